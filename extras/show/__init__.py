"""What a run shows: notes, alarms, report."""
