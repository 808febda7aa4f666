"""Rows of other forms: tables, lists, data sets of the hub, mixtures; conversations and pairs.

Importing it fills tables of core: .json, .csv, .parquet, hub:owner/name and lists of rows are then
read as .jsonl is, also in shares and with columns of other names (mixtures.py), and JSON is read
strictly. The fields of a Config take lists of rows, dicts and NumPy's numbers, and data sets of the
hub get their revision.

    tables.py          a reader of each kind of source; messages of other forms
    mixtures.py        sources as a flag names them
    demonstrations.py  conversations in the rows of a file, and their tokens (recorded.py)
    pairs.py           rows {"prompt", "chosen", "rejected"}
"""
from core import config, data
from envs import prompts, task_files
from extras.data import mixtures, tables
from extras.presence import has

data.JSON_RULES.update(tables.STRICT)
task_files.ROW_RULES.update(tables.OF_ROWS)
task_files.READERS.update(tables.READERS)
task_files.ROW_CHECKS.append(tables.need_text_row)
task_files.MIXERS.append(mixtures.rows_of)
prompts.MESSAGE_FORMS.append(tables.with_our_names)
config.FILLED += [mixtures.write_as_text, mixtures.pin_revisions]
if has("hints"):
    from extras.hints.command_line import YAML_LISTS
    YAML_LISTS.update(dict.fromkeys(mixtures.LISTS, tables.rows_as_json))
