"""Docstrings of public functions and classes have the sections of the house's form.

Args names every parameter, Returns says what a function returns, and an example runs (by doctest).
Seen red with: a parameter that Args does not name, a function without Returns, without an example.
"""

import importlib
import inspect
import re
from types import ModuleType

import pytest

FAMILIES = ["products", "reductions", "reductions.numpy"]
"""The packages whose names are read, with the modules among their names."""

WITHOUT_EXAMPLE: set[str] = set()
"""Names that have no example yet."""

SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)


def public(space, module):
    """(name, value) of the functions and classes that a module lists, and those of its modules."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from public(f"{space}.{name}", value)
        elif inspect.isclass(value) or inspect.isroutine(value):
            yield f"{space}.{name}", value


VALUES = {
    name: value
    for family in FAMILIES
    for name, value in public(family, importlib.import_module(f"torchweft.{family}"))
}


def sections(value):
    """The texts of a docstring by section; what stands before all of them is ""."""
    found = SECTION.split(inspect.cleandoc(value.__doc__ or ""))
    return {"": found[0], **dict(zip(found[1::2], found[2::2], strict=True))}


@pytest.mark.parametrize("name", VALUES)
def test_docstring_has_its_sections(name):
    value = VALUES[name]
    found = sections(value)
    assert found[""].strip(), "no summary"
    signature = inspect.signature(value)
    arguments = found.get("Args", "")
    missing = [p for p in signature.parameters if not re.search(rf"\b{p}\b.*: ", arguments)]
    assert not missing, f"Args does not name {missing}"
    if not inspect.isclass(value) and signature.return_annotation not in (None, "None"):
        assert found.get("Returns", "").strip(), "no Returns"
    if name not in WITHOUT_EXAMPLE:
        assert ">>> " in found.get("Example", ""), "no example"


def test_the_list_of_names_without_an_example_shrinks():
    kept = {name for name in WITHOUT_EXAMPLE if ">>> " not in (VALUES[name].__doc__ or "")}
    assert kept == WITHOUT_EXAMPLE, "these have one: take them off the list"
