"""Reading runs back: what an output folder, or a .jsonl of episodes, holds.

torch is not imported, so a report is written at once.
"""
import re
from pathlib import Path

from experiment.data import lines_of, objects, read_json, read_yaml, reading
from experiment.errors import UserError
from experiment.output_folder import algorithm_of

LOGS = ("metrics.jsonl", "timing.jsonl")
FILES = ("config.yaml", *LOGS, "trajectories.jsonl", "result.json")
OPTIONAL = {"token_ids": [], "loss_mask": [], "logprobs": [], "rewards": [], "reward_parts": {}}


class Record:
    """One run (an output folder), or one .jsonl of episodes, as it was written.

    Attributes:
        config, result: what the files say, {} where there is no such file.
        logs: the rows of each log.
        algorithm: the name of the program, or None.
        lines_of_step: {step, or -1 where none is stated: line numbers of its episodes}.
    """

    def __init__(self, name):
        """Read everything but the episodes. Raises UserError."""
        self.path = self.episode_file = Path(name)
        self.config, self.result, self.logs = {}, {}, []
        with reading(self.path):
            self.path.stat()
            self.algorithm = algorithm_of(self.path)
        if self.path.is_dir():
            self.episode_file = self.path / "trajectories.jsonl"
            self._read_folder()
        elif self.path.suffix != ".jsonl":
            raise UserError(f"{name}: give an output folder or a .jsonl of episodes")
        self.lines_of_step = {}
        if self.episode_file.is_file():
            # A run writes the step first, so that not every line must be parsed.
            for number, text in lines_of(self.episode_file):
                step = re.match(r'\{"step": (\d{1,12}),', text)
                self.lines_of_step.setdefault(int(step[1]) if step else -1, []).append(number)

    def _read_folder(self):
        there = [name for name in FILES if (self.path / name).is_file()]
        if not there:
            raise UserError(f"{self.path}: give an output folder (one that holds "
                            f"{', '.join(FILES)}), or a .jsonl of episodes")
        if "config.yaml" in there:
            lines = read_yaml(self.path / "config.yaml")
            self.config = {key: value for _, key, value in lines}
        if "result.json" in there:
            self.result = read_json(self.path / "result.json")
        for name in LOGS:
            if name in there:
                self.logs.append([row for _, row in objects(self.path / name)])

    def episodes_of(self, steps):
        """Yield (line number, episode) of these steps. UserError names a line that is none."""
        wanted = {number for step in steps for number in self.lines_of_step[step]}
        for number, row in objects(self.episode_file, wanted):
            with reading(self.episode_file, number):
                episode = {**OPTIONAL, **row, "reward": float(row["reward"])}
                episode["info"] = {"tool_calls": 0, **row["info"]}
            yield number, episode
