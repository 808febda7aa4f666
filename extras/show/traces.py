"""What `python agent.py --num_tasks N` does: play tasks, print some episodes, write all to a file.

Each episode is in the file of --output as soon as it has ended. Whatever ends the program early,
Ctrl-C, a broken environment or a full disk, the file holds the episodes that were finished.
"""
import os
import sys
from functools import partial
from pathlib import Path

from agent import Episode, Trajectory, rollout, rollout_options
from core.data import pass_at_k, summarise, to_json, transcript
from core.config import UserError, printable
from core.run import set_aside, write_whole
from layers import make_engine

SHOWN = 8  # episodes that are printed


def play_tasks(config, model, tokenizer, tasks: list[dict], traces: "Traces"):
    """Play the tasks of a config, write all episodes, and print the first ones and the summary."""
    options = rollout_options(config)
    limits = options["limits"]
    pay = options.pop("pay")
    options["engine"] = partial(make_engine, top_k=config.top_k, top_p=config.top_p)

    class Kept(Episode):
        def leave(self):
            """Write the episode. Paid at once, it is whole whatever ends the program early."""
            if pay:
                pay([self])
            traces.add(self.trajectory)

    print(f"playing {traces.total} episodes of {config.env} ({config.split}): at most "
          f"{limits.max_tokens} tokens each, {limits.max_new_tokens} a turn", flush=True)
    # With step -1 the same seed gives the episodes of a run's evaluation, and none of its training.
    episodes = rollout(model, tokenizer, config.env, tasks, config.group_size, step=-1,
                       agent=Kept, **options)
    traces.replace(episodes)
    for t in episodes[:SHOWN]:
        print(transcript(t.to_json()), end="\n\n")
    for name, value in (summarise(episodes) | pass_at_k(episodes)).items():
        print(f"{name:24}{value:>10.6g}")
    if traces.path:
        print(f"written: {printable(str(traces.path))}")


class Traces:
    """The file of --output. One that was there is renamed. Without one, every method is a no-op.

    Args:
        output: its path, or None. Raises UserError if it cannot be written.
        total: how many episodes are to be played.
    """

    def __init__(self, output: str | None, total: int):
        # An environment may change the current folder.
        self.path = Path(output).absolute() if output else None
        self.total = total
        self.count = self.size = 0  # episodes in the file, and their bytes
        if output:
            check_output(output)
            if self.path.stat().st_size:
                print(f"{self.path}: the file that was there is now {set_aside(self.path)}")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Say what is kept if anything ends the block early."""
        if not error or not self.path:
            return
        if self.count:
            print(f"{self.count} of {self.total} episodes were finished and are kept in "
                  f"{self.path}", file=sys.stderr)
        else:
            self.path.unlink(missing_ok=True)

    def add(self, trajectory: Trajectory):
        """Append an episode that has ended, unless its environment broke it."""
        if not self.path or trajectory.stop_reason == "error":
            return
        line = to_json(trajectory.to_json()).encode()
        try:
            with open(self.path, "ab") as file:
                file.write(line)
        except BaseException:
            # A full disk or a signal may have cut the line.
            os.truncate(self.path, self.size)
            raise
        self.size += len(line)
        self.count += 1

    def replace(self, trajectories: list[Trajectory]):
        """Write all episodes in the order of their tasks, with those that are broken."""
        if self.path:
            write_whole(self.path, "".join(to_json(t.to_json()) for t in trajectories))
            self.count = len(trajectories)


def check_output(path: str):
    """Raise UserError if the file cannot be written. It is made if there is none."""
    if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"--output {path}: is no regular file")
    try:
        open(path, "a").close()
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror}") from None
