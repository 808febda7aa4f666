"""What every lesson starts from: a tiny model that was taught to call tools.

Importing this file lets a lesson find the repository, so that `python
lessons/02_grpo.py` works from any folder. The model is made once, in a minute or two,
and kept in runs/lessons/start.
"""
import json
import platform
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FOLDER = ROOT / "runs" / "lessons"  # of the start model, and of what a lesson writes


def start_model() -> str:
    """Return the folder of the start model. It is the same one whatever the seed of a
    lesson is.

    A short SFT imitates a scripted expert most of whose actions are wrong: the model
    copies numbers and writes calls, and chooses poorly among them. With core alone,
    grpo.py makes the same one.
    """
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    folder = FOLDER / "start"
    if not folder.exists():
        print(f"making the start model in {folder}: a minute or two, once", flush=True)
        make(folder)
    return str(folder)


def make(folder, seed=0):
    """Make the start model. The folder gets its name when it is whole."""
    # A lesson that finds the model there needs none of this.
    from core.config import mix
    from core.tiny import TINY_SFT
    from envs import Limits, recommended
    from envs.tasks import load_tasks
    from lora import load_model
    from schooling import demonstrate, imitate
    model, tokenizer = load_model("tiny", seed=seed)
    tasks = load_tasks("equations", "train", TINY_SFT["max_samples"], seed)
    for i, task in enumerate(tasks):
        task.update(noise=TINY_SFT["expert_noise"], noise_seed=mix(seed, "train", i))
    limits = Limits(**recommended("equations") | {"max_turns": TINY_SFT["max_turns"]})
    imitate(model, demonstrate(tokenizer, "equations", tasks, limits), seed)
    unfinished = folder.with_name(".tmp-start")
    for thing in (model, tokenizer):
        thing.save_pretrained(unfinished)
    unfinished.rename(folder)


def report(name: str, seed: int, shown: dict, **result):
    """Write a lesson's results to runs/lessons/NAME.json, and print a short JSON
    object.

    It is the last line of the output: `shown`, which are the main figures, and the
    file's path.
    """
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), cpu)
    head = {"command": f"python lessons/{name}.py --seed {seed}", "seed": seed}
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(
        {**head, "machine": cpu, "date": str(date.today()), **shown, **result}) + "\n")
    line = json.dumps({**head, **shown, "file": str(path)})
    # Three decimals are enough to look at.
    print(json.dumps(json.loads(line, parse_float=lambda number: round(float(number), 3))))
