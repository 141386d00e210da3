"""Docstrings of public functions and classes have the sections of the house's form.

Args names every parameter, Returns says what a function returns, and an example runs (by doctest),
also where a user copies it: it imports what it uses.
A docstring may refer to another one for its arguments: "Args: see `SubMConv3d`."
Seen red with: a parameter that Args does not name, a function without Returns, without an example,
an example that does not import torch.
"""

import ast
import builtins
import doctest
import importlib
import inspect
import re
from types import ModuleType

import pytest
from torch import nn

FAMILIES = [
    "", "products", "reductions", "reductions.numpy", "o3", "clifford", "voxels", "compat",
    "distributed",
]  # fmt: skip
"""The packages whose names are read, with the modules among their names; "" is torchweft's own."""

WITHOUT_EXAMPLE: set[str] = set()
"""Names that have no example yet."""

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$", re.MULTILINE)
ELSEWHERE = re.compile(r"^Args: see `(\w+)`", re.MULTILINE)


def public(space, module):
    """(name, value) of the functions and classes that a module lists, and those of its modules."""
    for name in module.__all__:
        value = getattr(module, name)
        full = f"{space}.{name}".lstrip(".")
        if isinstance(value, ModuleType):
            yield from public(full, value) if space else ()  # families are read by themselves
        elif inspect.isclass(value) or inspect.isroutine(value):
            yield full, value


VALUES = {
    name: value
    for family in FAMILIES
    for name, value in public(family, importlib.import_module(f"torchweft.{family}".rstrip(".")))
}


def sections(value):
    """The texts of a docstring by section; what stands before all of them is ""."""
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    found = SECTION.split(inspect.cleandoc(text or ""))  # of its own, none inherited
    return {"": found[0], **dict(zip(found[1::2], found[2::2], strict=True))}


def arguments(name, found):
    """The text that names the parameters, which may be that of another name."""
    other = ELSEWHERE.search(found[""])
    if other:
        found = sections(VALUES[f"{name.rpartition('.')[0]}.{other[1]}"])
    return found.get("Args", "")


def signature(value):
    """What a caller passes and gets; a class without arguments of its own has none."""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if is_error or value.__init__ is nn.Module.__init__:
        return inspect.Signature()
    return inspect.signature(value)


def undefined(example):
    """Names that an example reads and neither defines nor imports; skipped lines left out."""
    read, defined = set(), set(dir(builtins))
    for line in doctest.DocTestParser().get_examples(example):
        for node in ast.walk(ast.parse(line.source if not line.options else "")):
            if isinstance(node, ast.Name):
                (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.alias):
                defined.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
    return read - defined


@pytest.mark.parametrize("name", VALUES)
def test_docstring_has_its_sections(name):
    value = VALUES[name]
    found = sections(value)
    assert found[""].strip(), "no summary"
    named, called = arguments(name, found), signature(value)
    missing = [p for p in called.parameters if not re.search(rf"\b{p}\b.*: ", named)]
    assert not missing, f"Args does not name {missing}"
    if not inspect.isclass(value) and called.return_annotation not in (None, "None"):
        assert found.get("Returns", "").strip(), "no Returns"
    if name not in WITHOUT_EXAMPLE:
        assert ">>> " in found.get("Example", ""), "no example"
        assert not undefined(found["Example"]), "names that the example does not import"


def test_the_list_of_names_without_an_example_shrinks():
    kept = {name for name in WITHOUT_EXAMPLE if ">>> " not in (VALUES[name].__doc__ or "")}
    assert kept == WITHOUT_EXAMPLE, "these have one: take them off the list"
