"""The result of a run in a notebook: a dict that shows the curves of its run."""
from html import escape

from experiment.data import read_json
from window.report import Record, summary


class Result(dict):
    """What result.json of an output folder holds. A notebook shows it as tiles and curves."""

    def __init__(self, folder):
        super().__init__(read_json(folder / "result.json"))
        self.folder = folder

    def _repr_html_(self):
        """Return the head of the run's report, in a frame that keeps its style to itself."""
        record = Record(self.folder)
        # None makes the notebook print the dict: another run has taken the folder since.
        if record.result != self:
            return None
        return f'<iframe srcdoc="{escape(summary(record))}" width="100%" height="600"></iframe>'
