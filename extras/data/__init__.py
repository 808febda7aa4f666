"""Rows of other forms: tables, lists, data sets of the hub, mixtures; conversations and pairs.

Importing it fills tables of core: .json, .csv, .parquet, hub:owner/name and lists of rows are then
read as .jsonl is, also in shares and with columns of other names (mixtures.py), and JSON is read
strictly. The fields of a Config take lists of rows, dicts and NumPy's numbers, and data sets of the
hub get their revision.

    tables.py          a reader of each kind of source; messages of other forms
    mixtures.py        sources as a flag names them
    strict.py          how JSON is read
    fields.py          what a Config may hold
    demonstrations.py  conversations in the rows of a file, and their tokens (recorded.py)
    pairs.py           rows {"prompt", "chosen", "rejected"}

Most runs read no rows: what reads them is imported with envs/task_files.py.
"""
from core import config, data
from extras.data.fields import LISTS, pin_revisions, write_as_text
from extras.data.strict import STRICT
from extras.presence import has


def fill_tables(task_files):
    """Fill the tables of envs/task_files.py, the module."""
    from extras.data import tables
    task_files.ROW_RULES.update(tables.OF_ROWS)
    task_files.READERS.update(tables.READERS)
    task_files.ROW_CHECKS.append(tables.need_text_row)
    task_files.MIXERS.append(rows_of)


def rows_of(data, fields, seed):
    """Yield (place, row) of all rows of several sources, with columns of other names."""
    from extras.data import mixtures
    return mixtures.rows_of(data, fields, seed)


def with_our_names(value):
    """Return what a field holds with our names: messages, one message, or text that has some."""
    from extras.data import tables
    return tables.with_our_names(value)


def rows_as_json(node):
    """Return the JSON of a YAML list of rows, or the names of a list of files, with commas."""
    from extras.data import tables
    return tables.rows_as_json(node)


data.JSON_RULES.update(STRICT)
data.MESSAGE_FORMS.append(with_our_names)
data.ROW_TABLES.append(fill_tables)
config.FILLED += [write_as_text, pin_revisions]
if has("hints"):
    from extras.hints.command_line import YAML_LISTS
    YAML_LISTS.update(dict.fromkeys(LISTS, rows_as_json))
