"""What the scripts of bench/ import, patch, set and pass as flags exists, in the code in their strings too."""
import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from core.config import options

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {path.stem: path.read_text() for path in sorted((ROOT / "bench").glob("*.py"))}
CONFIGS = {name: set(options(import_module(name).Config)) for name in ("grpo", "sft", "dpo", "distill", "reward_weighted", "agent_program")}
FLAGS = set(re.findall(r'add_argument\("--(\w+)', "".join(SCRIPTS.values()))).union(*CONFIGS.values())
TORCHRUN = {"node_rank", "nproc_per_node", "master_addr", "master_port", "rdzv_backend", "rdzv_conf"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_names_exist(script, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    assert set(re.findall(r"--([a-z]\w*_\w+)", SCRIPTS[script])) <= FLAGS | TORCHRUN
    whole = ast.parse(SCRIPTS[script])
    strings = [node.value for node in ast.walk(whole) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for program in (whole, *(ast.parse(text) for text in strings if re.search(r"^import \w+", text, re.M))):
        nodes, names = list(ast.walk(program)), {}
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), script, "exec"), names)
        for node in nodes:
            match node:
                case ast.Attribute(ast.Name(name), attribute) if inspect.ismodule(names.get(name)):
                    assert hasattr(names[name], attribute), f"{name}.{attribute}"
            match node:
                case ast.Assign([ast.Attribute(ast.Name(name), attribute)], ast.Lambda(args)) if inspect.ismodule(names.get(name)):
                    assert args.vararg or len(args.args) == len(inspect.signature(getattr(names[name], attribute)).parameters), attribute
                case ast.Call(ast.Attribute(ast.Name(name), "Config"), keywords=keywords) if name in CONFIGS:
                    assert {keyword.arg for keyword in keywords} - {None} <= CONFIGS[name]


@pytest.mark.parametrize("script", ["course", "kills", "gpu_parts"])  # their arguments are places
def test_help_is_help_and_no_argument(script, tmp_path):
    command = [sys.executable, str(ROOT / "bench" / f"{script}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"python bench/{script}.py" in done.stdout and not list(tmp_path.iterdir())
