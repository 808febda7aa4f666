"""lora.py info and push: what is in a folder, and its way to the hub, with the real client and a hub of this machine."""
import base64
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml

import merge
import sft
from core.model import adamw
from extras.exact.checkpoint import read_state
from extras.show.hub import info
from layers import Run, load_model
from lora import adapted_linears

ROOT = Path(merge.__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output folder of a run of one step, of an adapter on the tiny model, that has updated nothing."""
    folder = tmp_path_factory.mktemp("run") / "sft"
    config = sft.settle(sft.Config(output_dir=str(folder), lora_r=3, max_steps=1, env="equations", learning_rate=0.5))
    model, tokenizer = load_model("tiny", lora_r=3)
    for linear in adapted_linears(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.05)
    run = Run(config, "sft")
    with run:
        run.load(model, tokenizer, adamw(model, lr=0.5), 1)
        run.log_evaluation(0, {"success": 0.25, "episodes": 40, "loss": 2.5})
        run.log(loss=1.0)
        run.end_step(0)
        run.finish({"success": 0.75, "episodes": 40, "loss": 1.5})
    return folder


@pytest.fixture
def hub(tmp_path):
    """A hub: it takes what huggingface_hub uploads, large files by LFS, and writes it to `hub.folder`."""
    class Hub(BaseHTTPRequestHandler):
        def answer(self, value, status=200):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def body(self):
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                data = b""
                while size := int(self.rfile.readline(), 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return data
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_PUT(self):
            server.stored[self.path.rpartition("/")[2]] = self.body()
            self.answer({})

        def do_POST(self):
            data = self.body()
            server.asked.append((self.path, data))
            if self.headers.get("Authorization") != "Bearer hf_good" and not self.path.endswith("validate-yaml"):
                return self.answer({"error": "Invalid username or password."}, 401)
            if self.path.endswith("/preupload/main"):
                names = [file["path"] for file in json.loads(data)["files"]]
                return self.answer({"files": [{"path": name, "uploadMode": "lfs" if name.endswith("safetensors") else "regular", "shouldIgnore": False}
                                              for name in names]})
            if self.path.endswith("/objects/batch"):
                return self.answer({"objects": [{**item, "actions": {"upload": {"href": f"{url}/lfs/{item['oid']}"}}}
                                                for item in json.loads(data)["objects"]]})
            if self.path.endswith("/commit/main"):
                for line in data.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "header":
                        server.message = entry["value"]["summary"]
                        continue
                    path = server.folder / entry["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    is_large = entry["key"] == "lfsFile"
                    path.write_bytes(server.stored[entry["value"]["oid"]] if is_large else base64.b64decode(entry["value"]["content"]))
                return self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/me/x/commit/{'0' * 40}"})
            self.answer({"url": f"{url}/me/x", "errors": [], "warnings": []})

        def log_message(self, *_):
            pass
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = server.url = f"http://127.0.0.1:{server.server_port}"
    server.stored, server.asked, server.folder = {}, [], tmp_path / "hub"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def push(hub, *words):
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_good", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "lora.py", "push", *map(str, words)], cwd=ROOT, env=environ, capture_output=True, text=True)


def code_of(card):
    return re.findall("```python\n(.*?)```", card, re.S)


def test_what_is_pushed_is_loaded_by_peft_and_transformers_as_its_card_says(run, hub, tmp_path, monkeypatch):
    done = push(hub, run, "me/x", "--private")
    assert done.returncode == 0 and done.stdout.startswith("uploaded: me/x, "), done.stderr
    [created] = [json.loads(data) for path, data in hub.asked if path == "/api/repos/create"]
    assert (created["name"], created["organization"]) == ("x", "me") and "private" in (*created, *created.values()), created
    assert hub.message == "sft, by lora.py push"
    names = {path.relative_to(hub.folder).as_posix() for path in hub.folder.rglob("*") if path.is_file()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md", "base/model.safetensors"} <= names
    assert not {"optimizer.safetensors", "state.json", "base/optimizer.safetensors"} & names
    assert json.loads((hub.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/x/base"
    monkeypatch.chdir(tmp_path)
    token_ids = torch.arange(5, 25)[None]
    expected = load_model(str(run), train=False)[0](token_ids).logits
    peft, transformers = code_of((hub.folder / "README.md").read_text())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: name)
    for code in (peft, transformers):
        names = {}
        exec(code.replace('"me/x"', repr(str(hub.folder))), names)
        if code is transformers:
            assert torch.allclose(names["model"](token_ids).logits, expected, atol=1e-5)
    # What the first block has merged is what Ollama imports.
    merged, tokenizer = load_model("merged", train=False)
    assert torch.allclose(merged(token_ids).logits, expected, atol=1e-5) and tokenizer.chat_template


def test_a_run_that_is_reached_by_a_link_has_its_base_beside_it(run, tmp_path, capsys):
    (tmp_path / "link").symlink_to(run)
    assert merge.main(["push", str(tmp_path / "link"), "me/x", "--dry_run"]) == 0
    assert "base/model.safetensors" in capsys.readouterr().out


def test_the_card_says_what_the_run_was(run, capsys):
    checkpoint = run / "checkpoints" / "step_000001"
    assert merge.main(["push", str(run), "me/x", "--dry_run"]) == 0
    assert capsys.readouterr().out.startswith(f"written: {checkpoint / 'README.md'}; not uploaded: adapter_model.safetensors, base/")
    read_state(checkpoint)  # the seal is whole
    _, head, text = (checkpoint / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "peft", "tags": ["agentic-rl", "tool-use", "sft"]}
    assert "This is a LoRA adapter of rank 3 (alpha 6) on 4 layers of the model in base/." in text
    assert "| 40 held-out tasks (95 % interval) | before | after |\n|---|---|---|\n| success | 0.250 (0.142 to 0.402) | 0.750 (0.598 to 0.858) |\n" in text
    assert "| loss | 2.500 | 1.500 |" in text and "`sft.py`" in text and ", after step 1." in text and "Data: `--env equations`." in text
    flags = yaml.safe_load(re.search("```yaml\n(.*?)```", text, re.S)[1])
    assert flags.items() >= {"lora_r": 3, "learning_rate": 0.5, "max_steps": 1}.items() and not flags.keys() & {"seed", "output_dir", "num_epochs"}
    assert "vllm serve x/base --enable-lora --max-lora-rank 8 --lora-modules x=x" in text and "ollama create x" in text


def test_a_base_that_others_do_not_have_is_named_or_refused(run, tmp_path, capsys):
    path = run / "checkpoints" / "step_000001" / "adapter_config.json"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        (adapter / name).write_bytes((path.parent / name).read_bytes())
    config = json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path), "r": 33}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    words = ["push", str(adapter), "me/x", "--dry_run"]
    assert merge.main(words) == 2
    assert f"lora.py: {adapter}: its base model is {tmp_path}, a folder that others do not have; name it on the hub" in capsys.readouterr().err
    assert merge.main([*words, "--base", "Qwen/Qwen3-0.6B"]) == 0
    text = (adapter / "README.md").read_text()
    assert "library_name: peft\nbase_model: Qwen/Qwen3-0.6B\ntags: [agentic-rl, tool-use, agent]\n---" in text and "## Training" not in text
    assert 'from_pretrained("Qwen/Qwen3-0.6B", dtype="float32")' in text and "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 64" in text


def test_info_says_what_a_folder_is(run, tmp_path, capsys):
    assert merge.main(["info", str(run)]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: text.strip() for name, text in lines.items()}
    checkpoint = run / "checkpoints" / "step_000001"
    assert lines["folder"] == str(checkpoint) and lines["run"] == "sft, after step 1; from tiny"
    assert lines["holds"] == f"a LoRA adapter of rank 3 (alpha 6) on 4 layers of {checkpoint / 'base'}"
    assert lines["adapts"] == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    model, tokenizer = load_model("tiny", lora_r=3)
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lines["sizes"].startswith(f"{n:,} parameters; ") and "adapter_model.safetensors 0.1 MiB" in lines["sizes"]
    assert lines["template"] == f"{len(tokenizer.chat_template):,} characters, with tools"
    merge.merge(str(run), str(tmp_path / "merged"))
    text = info(str(tmp_path / "merged"))
    n = sum(p.numel() for p in load_model("tiny")[0].parameters())
    assert "holds:    a model of 4 layers" in text and f"{n:,} parameters; model.safetensors" in text and "run:" not in text
    assert merge.main(["push", str(tmp_path / "merged"), "me/x", "--dry_run"]) == 0
    text = (tmp_path / "merged" / "README.md").read_text()
    # A card that somebody has written stays, under another name.
    (tmp_path / "merged" / "README.md").write_text("mine")
    for _ in range(2):
        assert merge.main(["push", str(tmp_path / "merged"), "me/x", "--dry_run"]) == 0
    assert (tmp_path / "merged" / "README.md.1").read_text() == "mine" and not (tmp_path / "merged" / "README.md.2").exists()
    assert "library_name: transformers" in text and "PEFT is not needed" in text and "vllm serve me/x\n" in text


def test_what_cannot_be_is_answered_in_one_line(run, hub, tmp_path, capsys, monkeypatch):
    for words, says in ((["info", str(tmp_path)], f"{tmp_path}: holds no run with a checkpoint, no adapter and no model"),
                        (["push", str(run), "a/b/c"], "Repo id must be in the form")):
        assert merge.main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("lora.py: ") and says in error and error.count("\n") == 1
    for name, value in (("constants.ENDPOINT", hub.url), ("constants.HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(f"huggingface_hub.{name}", value)
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    assert merge.main(["push", str(run), "me/x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lora.py: ") and "401" in error and error.count("\n") == 1 and not hub.folder.exists(), error
    monkeypatch.setitem(sys.modules, "extras.show.hub", None)
    assert merge.main(["push", str(run), "me/x"]) == 2
    assert capsys.readouterr().err == "lora.py: push needs extras/show, which is not here\n"
