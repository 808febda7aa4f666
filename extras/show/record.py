"""What every sampled token was worth: tokens.jsonl, beside trajectories.jsonl.

`run.record` gets the tensors of a backward pass, and a line an episode keeps them and the gradient
of `new`, as `weight`:

    {"step": 3, "line": 5, "advantages": [A], "old": [..], "new": [FIRST, LAST], "weight": [..]}

Each text is `packed`: a float32 for every sampled token, in the order of `token_ids`; of several
updates there are the first and the last. `weight` is d loss / d logprob: what multiplied grad log
pi of the token. Without `old`, the denominator of the ratio is the `logprobs` of the sampler.
Without `new`, no update has forwarded the episode: its advantages and weights are 0.
`line` counts the step's lines in trajectories.jsonl. Where a step has none (sft.py, dpo.py), two
episodes stand here whole. The lines are JSON because logs are: a resumed run cuts them, and a
large one thins them.
"""
import base64
import zlib
from contextlib import suppress

import numpy as np
import torch

import core.run
from core.run import LOGS, cut_log

TOKENS = "tokens.jsonl"
LOGS.append(TOKENS)
BARS = 10  # of the histogram of a step's rewards


def packed(values) -> str:
    """Return numbers as text: base64 of the zlib-compressed bytes of float32s.

    All first bytes stand before all second bytes: signs and exponents are much alike.
    """
    array = np.asarray(values, np.float32)
    planes = array.view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def unpacked(text: str):
    """Return the float32 array of a text that `packed` has made."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return planes.reshape(4, -1).T.copy().view(np.float32).ravel()


class Recording(core.run.Run):
    """A run that writes tokens.jsonl.

    Attributes:
        recorded: {id of an episode: (the episode, {name: its values in the first and last update})}
        token_lines: the lines of tokens.jsonl that the present step is to write.
    """

    def __init__(self, config, algorithm):
        super().__init__(config, algorithm)
        self.recorded, self.token_lines = {}, []

    def load(self, model, tokenizer, optimizer, total):
        # What dpo.py has played is of no step.
        self.written = []
        first = super().load(model, tokenizer, optimizer, total)
        if not first:
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            self.log(trained_parameters=sum(p.numel() for p in weights),
                     parameters=model.num_parameters())
        return first

    def log_episodes(self, episodes):
        super().log_episodes(episodes)
        counts, edges = np.histogram([t.reward for t in episodes], BARS)
        self.log(reward_histogram=counts.tolist(), reward_min=edges[0], reward_max=edges[-1])

    def record(self, episodes, **columns):
        if not (self.config.record or self.config.show_every):
            return
        if "new" in columns:
            columns["weight"] = columns["new"].grad
        if not self.recorded:
            # The first of the first pass and the one in its middle: of pairs chosen and rejected.
            episodes_to_keep = self.written or [episodes[0], episodes[len(episodes) // 2]]
            self.recorded = {id(t): (t, {}) for t in episodes_to_keep}
        for row, t in enumerate(episodes):
            if id(t) in self.recorded:
                keep(self.recorded[id(t)][1], row, t, columns)

    def end_step(self, step):
        lines = self.lines_of_step(step)
        # All ranks have to be here, and only one writes.
        self.token_lines = [line for share in self.ranks.gather(lines) for line in share]
        self.token_lines += self.lines_left_out(step)
        self.token_lines.sort(key=lambda line: line.get("line", 0))
        super().end_step(step)
        self.recorded, self.written = {}, []

    def lines_of_step(self, step) -> list[dict]:
        """Return the lines of what this process has recorded in a step."""
        number = {id(t): i for i, t in enumerate(self.written)}
        lines = []
        for t, columns in self.recorded.values():
            # Another rank has the gradients of the other episodes.
            if "new" not in columns or not self.config.record:
                continue
            place = {"episode": t.to_json()}
            if id(t) in number:
                place = {"line": number[id(t)]}
            lines.append({"step": step} | place | texts_of(t, columns))
        return lines

    def lines_left_out(self, step) -> list[dict]:
        """Return the lines of what the step has written and no rank has trained: of weight 0."""
        # An update that was skipped, or none, has recorded nothing.
        if not (self.recorded and self.config.record):
            return []
        trained = {line["line"] for line in self.token_lines if "line" in line}
        lines = []
        for number, t in enumerate(self.written):
            if number not in trained:
                zeros = torch.zeros(len(t.loss_mask))
                columns = {**self.recorded[id(t)][1], "advantages": [zeros], "weight": [zeros]}
                lines.append({"step": step, "line": number} | texts_of(t, columns))
        return lines

    def write_line(self, step, metrics, timing):
        super().write_line(step, metrics, timing)
        self.write_tokens()

    def write_tokens(self):
        if self.token_lines:
            self.append(TOKENS, self.token_lines)
            self.token_lines = []

    def __exit__(self, kind, error, traceback):
        """Write the lines of a step that has ended if what failed has left them out."""
        if self.token_lines and self.writes:
            with suppress(OSError):
                cut_log(self.folder / TOKENS, self.token_lines[0]["step"])
                self.write_tokens()
        super().__exit__(kind, error, traceback)


def keep(passes, row, episode, columns):
    """Add an episode's values, row `row` of each column, to its {name: [first, last]}.

    A dict has a number of each episode, and None has nothing.
    """
    for name, column in columns.items():
        if column is None:
            continue
        values = torch.tensor([column[episode]]) if isinstance(column, dict) else column[row]
        passes.setdefault(name, [])[1:] = [values.detach()]


def texts_of(episode, columns) -> dict:
    """Return {name: [packed, ..]} of the sampled tokens of an episode."""
    mask = torch.tensor(episode.loss_mask, dtype=torch.bool)
    sampled = packed(torch.tensor(episode.logprobs)[mask])
    texts = {}
    for name, passes in columns.items():
        texts[name] = []
        for values in passes:
            values = values.float().cpu()
            if name == "entropy":  # to three digits, which take half the room
                values = values.half().float()
            # A number of the whole episode is (1,).
            texts[name].append(packed(values if len(values) == 1 else values[:len(mask)][mask]))
    if texts.get("old") == [sampled]:
        del texts["old"]
    return texts
