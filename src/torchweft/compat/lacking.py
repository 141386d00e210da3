"""Names of an original that a stand-in lacks: an error that says the nearest way."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lacking"]


def lacking(module: str, ways: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a module: the nearest way by name of the original.

    A name that the original does not have either is an AttributeError, as programs that look for
    versions of a library expect.

    Raises:
        NotImplementedError: by the returned function, for the names in `ways`.
    """
    original = module.removeprefix("torchweft.compat.")

    def find(name: str) -> Any:
        if name in ways:
            raise NotImplementedError(
                f"{original}.{name} is asked for: torchweft's stand-in does not have it. "
                f"{ways[name]}"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
