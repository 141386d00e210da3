"""The code that a chapter ran, as its page shows it: taken from the sources when the page is made.

What is shown are whole functions or classes of one module, without their docstrings, below those of
the module's imports and constants that they use.
"""

from __future__ import annotations

import ast
import inspect
import io
import keyword
import textwrap
import tokenize
from collections.abc import Callable
from html import escape
from typing import Any

__all__ = ["shown", "snippet"]

Shown = Callable[..., Any]


def shown(*parts: Shown) -> str:
    """HTML of the code of functions or classes, and of the file that it stands in."""
    file = parts[0].__module__.replace(".", "/")
    return (
        f"<pre>{_coloured(snippet(*parts))}</pre>"
        f"<figcaption>The code that was run, from {escape(file)}.py.</figcaption>"
    )


def snippet(*parts: Shown) -> str:
    """The text of functions or classes of one module, with the imports that they need."""
    texts = [_without_docstrings(textwrap.dedent(inspect.getsource(part))) for part in parts]
    module = inspect.getmodule(parts[0])
    assert module is not None
    body = ast.parse(inspect.getsource(module)).body
    used = set().union(*(_names(ast.parse(text)) for text in texts))
    constants = [node for node in body if _is_constant(node, used)]
    used |= set().union(*map(_names, constants))
    lines = [_import(node, used) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    blocks = ["\n".join(line for line in lines if line), "\n".join(map(ast.unparse, constants))]
    return "\n\n".join([*filter(None, blocks), *texts])


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_constant(node: ast.stmt, used: set[str]) -> bool:
    """Whether a statement gives a value to a capitalised name that is used."""
    return isinstance(node, ast.Assign) and bool(
        {name for name in map(ast.unparse, node.targets) if name[0].isupper()} & used
    )


def _import(node: ast.Import | ast.ImportFrom, used: set[str]) -> str:
    """An import of the names that are used."""
    names = [alias for alias in node.names if (alias.asname or alias.name) in used]
    if not names:
        return ""
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(names))
    return ast.unparse(ast.ImportFrom(node.module, names, 0))


def _without_docstrings(text: str) -> str:
    lines: list[str | None] = list(text.rstrip().split("\n"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            first = node.body[0]
            assert first.end_lineno is not None
            blank = first.end_lineno < len(lines) and not lines[first.end_lineno]
            for number in range(first.lineno - 1, first.end_lineno + blank):
                lines[number] = None
    return "\n".join(line for line in lines if line is not None)


def _coloured(text: str) -> str:
    """Keywords in <b>, comments in <i>."""
    marked, done = "", 0
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        tag = "i" if token.type == tokenize.COMMENT else "b" * keyword.iskeyword(token.string)
        if tag:
            begin = starts[token.start[0] - 1] + token.start[1]
            marked += f"{escape(text[done:begin])}<{tag}>{escape(token.string)}</{tag}>"
            done = begin + len(token.string)
    return marked + escape(text[done:])
