"""From flags to an output folder to a report: everything in a run that has no equation."""
