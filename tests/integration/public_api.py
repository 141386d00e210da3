"""Names and signatures of the public API, one a line: `python -m tests.integration.public_api`."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

PACKAGE = "torchweft"
SPACES = (
    "", "products", "o3", "clifford", "reductions", "reductions.cluster", "reductions.numpy",
    "voxels", "compat", "distributed", "distributed.cost", "testing",
)  # fmt: skip


def lines(package: str = PACKAGE) -> Iterator[str]:
    """Every public name with its signature; methods of classes behind the class."""
    for space in SPACES:
        module = importlib.import_module(f"{package}.{space}".rstrip("."))
        for name in sorted(module.__all__):
            yield from _described(f"{space}.{name}".lstrip("."), getattr(module, name))


def _described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"{name} module"
    elif inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"{name} class ({bases}) {_signature(value)}"
        for attribute in sorted(vars(value)):
            if not attribute.startswith("_") or attribute in ("__call__", "__init__"):
                yield f"{name}.{attribute} {_member(vars(value)[attribute])}"
    elif callable(value):
        yield f"{name} {_signature(value)}"
    else:
        yield f"{name} {type(value).__name__}"


def _member(value: Any) -> str:
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {_signature(value.__func__)}"
    if inspect.isfunction(value):
        return _signature(value)
    return type(value).__name__


def _signature(function: Any) -> str:
    """Parameters with their defaults; annotations are left out."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(built in)"
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


if __name__ == "__main__":
    print(*lines(*sys.argv[1:]), sep="\n")
