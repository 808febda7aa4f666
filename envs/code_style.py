"""What a reviewer would remark in a function, and what could stop the counter of its operations."""
import ast

# The counter of operations runs beside the model's code, which could stop it. Code that imports
# other modules than MODULES, or that uses a private name or one of REFLECTION, earns nothing for
# its efficiency. This is no wall: who finds a way around it gains that part of the reward only.
MODULES = {"bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "re",
           "string", "typing"}
REFLECTION = {"sys", "eval", "exec", "compile", "getattr", "globals", "locals", "vars", "open",
              "attrgetter", "methodcaller", "Formatter", "get_type_hints", "singledispatch"}


def style_findings(tree: ast.Module) -> list[str]:
    """Return what a reviewer would remark, one line each."""
    findings, read, bound = [], set(), {}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) if name != name.lower():
                findings.append((node.lineno, f"the function {name} is not in snake_case"))
            case ast.arguments(defaults=defaults):
                findings += [(default.lineno, "a default is mutable") for default in defaults
                             if isinstance(default, ast.List | ast.Dict | ast.Set)]
            case ast.ExceptHandler(type=None):
                findings.append((node.lineno, "except catches everything"))
            case ast.Compare(ops=[ast.Eq() | ast.NotEq()],
                             comparators=[ast.Constant(None | True | False)]):
                findings.append((node.lineno, "== with None, True or False"))
            case ast.Global() | ast.Nonlocal():
                findings.append((node.lineno, "a global or nonlocal variable"))
            case ast.Name(name, ast.Load()):
                read.add(name)
            case ast.Name(name) | ast.alias(asname=str(name)) | ast.alias(name=name):
                bound.setdefault(name.split(".")[0], node.lineno)
    findings += [(line, f"{name} is never used") for name, line in bound.items()
                 if name not in read and not name.startswith("_")]
    return [f"style, line {line}: {text}" for line, text in sorted(findings)]


def is_reflective(tree: ast.Module) -> bool:
    """True if the code may reach the interpreter: other modules than MODULES, or REFLECTION."""
    modules, names = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                modules.update(alias.name for alias in aliases)
            case ast.ImportFrom(module):
                modules.add(module)
            case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name):
                names.add(name)
    private = [name for name in names if name.startswith("_") and name != "_"]
    return bool(private or names & REFLECTION or modules - MODULES)
