"""Runs pykeops' own tests with torchweft's stand-in under pykeops' names; prints passed and failed.

    python -m benchmarks.peers.pykeops_tests CHECKOUT

CHECKOUT is a clone or an unpacked sdist of pykeops.  Its tests are read from there; nothing else of
it is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.foreign_tests import options_of, run_tests
from torchweft import compat


def find(checkout: Path) -> Path:
    """The package pykeops of a clone, an sdist, or itself."""
    for folder in (checkout, checkout / "pykeops", checkout / "pykeops" / "pykeops"):
        if (folder / "test" / "test_torch.py").is_file():
            return folder
    raise SystemExit(
        f"{checkout} holds no pykeops/test/test_torch.py: name a clone or an unpacked sdist."
    )


def main(arguments: list[str] | None = None) -> int:
    given = options_of(__doc__, arguments)
    package = find(given.checkout)
    compat.install("pykeops")
    files = sorted((package / "test").glob("test_*.py"))
    return run_tests(files, ["--continue-on-collection-errors", *given.options])


if __name__ == "__main__":
    sys.exit(main())
