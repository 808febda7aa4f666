"""Tool calls as Llama 4 and LFM write them: [f(x=1), g(y="a")]. Nothing is evaluated."""
import ast
import json
import re
import warnings

from core.tool_calls import unique

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
# A string in which a call may stand, quotes and all.
CALL = r"[\w.]{1,64}\((?:[^()']|'[^']{0,4096}')*+\)"
QUOTED = re.compile(rf"'((?:\\.|{CALL}|(?!'\s*(?:,\s*\w+=|\)\s*[,\]]))[^\\])*+)'?", re.S)


def read(source: str):
    """Yield the unchecked calls in [f(x=1), g(y="a")], or raise what the parser raises."""
    # Python warns of an escape such as "\d".
    with warnings.catch_warnings(action="ignore"):
        try:
            tree = ast.parse(source, mode="eval").body
        # LFM2.5 leaves newlines and quotes in a string as they are.
        except SyntaxError:
            tree = ast.parse(QUOTED.sub(r"'''\1'''", source), mode="eval").body
    calls = []
    for node in tree.elts:
        keys = [keyword.arg for keyword in node.keywords]
        if node.args or None in keys:  # None: **arguments
            raise ValueError("expected [name(key=value, ...)]")
        values = [_JsonWords().visit(keyword.value) for keyword in node.keywords]
        try:
            values = list(map(ast.literal_eval, values))
        except ValueError:
            raise ValueError("arguments must be literal values") from None
        arguments = unique(list(zip(keys, values)))
        calls.append({"name": ast.unparse(node.func), "arguments": arguments})
    yield from calls


class _JsonWords(ast.NodeTransformer):
    """Reads true, false and null, which LFM2 writes inside lists and objects."""

    def visit_Name(self, node):
        return ast.Constant(json.loads(node.id)) if node.id in PYTHON_WORDS.values() else node
