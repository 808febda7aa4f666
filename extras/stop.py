"""The end of a run before its last step: by a signal, a full disk, updates that are not finite."""
from core.config import Printable


class Stop(Printable):
    """Ends a run early. It is no Exception: what catches the faults of a tool lets it pass."""

    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code
