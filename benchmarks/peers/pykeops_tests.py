"""Runs pykeops' own tests with torchweft.reductions under pykeops' names; prints passed and failed.

    python -m benchmarks.peers.pykeops_tests CHECKOUT

CHECKOUT is a clone or an unpacked sdist of pykeops.  Its tests, and the helper functions of
pykeops/numpy/utils.py that they import, are read from there; nothing else of it is used.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

import torchweft.reductions
from benchmarks.peers.foreign_tests import module, options_of, run_tests
from torchweft.reductions import cluster
from torchweft.reductions import numpy as arrays


def install(package: Path) -> None:
    """Make pykeops and keopscore importable, as torchweft.reductions."""
    config = module("pykeops.config", gpu_available=torch.cuda.is_available())
    sys.modules["pykeops.torch"] = torchweft.reductions
    sys.modules["pykeops.torch.cluster"] = cluster
    module("pykeops.torch.operations", KernelSolve=torchweft.reductions.KernelSolve)
    sys.modules["pykeops.numpy"] = arrays
    sys.modules["pykeops.numpy.cluster"] = cluster
    pykeops = module("pykeops", config=config, torch=torchweft.reductions, numpy=arrays)
    pykeops.__path__ = []
    module("keopscore", auto_factorize=False)
    _load("pykeops.numpy.utils", package / "numpy" / "utils.py")


def _load(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


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
    install(package)
    files = sorted((package / "test").glob("test_*.py"))
    return run_tests(files, ["--continue-on-collection-errors", *given.options])


if __name__ == "__main__":
    sys.exit(main())
