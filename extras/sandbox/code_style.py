"""What a reviewer would remark in a function."""
import ast


def style_findings(tree: ast.Module) -> list[str]:
    """Return what a reviewer would remark, one line each."""
    # from math import * and from __future__ import annotations have no name that is read.
    findings, read, bound = [], {"*", "annotations"}, {}
    for node in ast.walk(tree):
        match node:
            case ast.arguments(defaults=defaults, kw_defaults=more):
                findings += [(default.lineno, "a default is mutable") for default in defaults + more
                             if isinstance(default, ast.List | ast.Dict | ast.Set)]
            case ast.ExceptHandler(type=None):
                findings.append((node.lineno, "except catches everything"))
            case ast.Compare(ops=[ast.Eq() | ast.NotEq()],
                             comparators=[ast.Constant(None | True | False)]):
                findings.append((node.lineno, "== with None, True or False"))
            case ast.Name(name, ast.Load()):
                read.add(name)
            case ast.Name(name) | ast.alias(asname=str(name)) | ast.alias(name=name):
                bound.setdefault(name.split(".")[0], node.lineno)
    findings += [(line, f"{name} is never used") for name, line in bound.items()
                 if name not in read and not name.startswith("_")]
    return [f"style, line {line}: {text}" for line, text in sorted(findings)]
