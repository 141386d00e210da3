"""Runs e3nn's own tests with torchweft.o3 under e3nn's names; prints passed and failed.

    python -m benchmarks.peers.e3nn_tests CHECKOUT [options of pytest]

CHECKOUT is a clone or an unpacked sdist of e3nn.  Its tests and e3nn/util, which they import, are
read from there; nothing else of it is used.

Tests that look into e3nn see this in torchweft's place: a layer itself where they make a
TorchScript of it, which torch has given up and torchweft does not promise, and its pickle where
they save the script; of options of e3nn's generated code, which change no result, what was asked
for; of `_Sortcut`, a part of e3nn's Gate that torchweft's does not need, nothing; a RuntimeError,
e3nn's kind, where weights are missing.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.peers.foreign_tests import module, options_of, run_tests
from torchweft import o3
from torchweft.errors import ShapeError

FILES = (
    "o3/cartesian_spherical_harmonics_test.py",
    "o3/irreps_test.py",
    "o3/linear_test.py",
    "o3/norm_test.py",
    "o3/rotation_test.py",
    "o3/tensor_product_sub_test.py",
    "o3/tensor_product_test.py",
    "o3/wigner_test.py",
    "math/normalize_activation_test.py",
    "math/soft_one_hot_test.py",
    "nn/activation_test.py",
    "nn/batchnorm_test.py",
    "nn/dropout_test.py",
    "nn/gate_test.py",
    "nn/normact_test.py",
)
"""Below e3nn's tests/."""

MODULES = ("Activation", "BatchNorm", "Dropout", "Gate", "Identity", "NormActivation")
"""Those of e3nn.nn."""

COMPILED = (
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "Linear",
    "TensorProduct",
    "TensorSquare",
)
"""Layers with generated code in e3nn."""

CODE = ("compile_left_right", "compile_right", "_specialized_code", "_optimize_einsums")
"""Options of e3nn's generated code, which its layers keep as attributes."""

DEFAULTS = {"specialized_code": True, "optimize_einsums": True, "jit_mode": "eager"}
"""e3nn's options, which tests set and reset."""


class _Names(ModuleType):
    """e3nn.o3.irrep: its l1o is Irrep("1o")."""

    def __getattr__(self, name: str) -> o3.Irrep:
        if not name.startswith("l"):
            raise AttributeError(name)
        return o3.Irrep(name[1:])


def _compiling(layer: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The layer with e3nn's options of code generation, and its kind of error."""

    class Compiling(layer):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            code = {name: options.pop(name) for name in CODE if name in options}
            try:
                super().__init__(*args, **options)
            except ShapeError as error:
                kind = ValueError if issubclass(layer, o3.Linear) else AssertionError
                raise kind(error) from error
            self.__dict__.update(code)

        def forward(self, *given: Any, **named: Any) -> torch.Tensor:
            try:
                found: torch.Tensor = super().forward(*given, **named)
                return found
            except ShapeError as error:
                raise RuntimeError(error) from error

        def save(self, path: str) -> None:
            torch.save(self, path)

    Compiling.__name__ = Compiling.__qualname__ = layer.__name__
    Compiling.__module__ = "e3nn.o3"  # where pickle looks for it
    return Compiling


def install(package: Path) -> None:
    """Make e3nn importable, as torchweft.o3 and the checkout's e3nn.util."""
    irrep = _Names("e3nn.o3.irrep")
    sys.modules["e3nn.o3.irrep"] = irrep
    names = {name: getattr(o3, name) for name in o3.__all__}
    products = {name: _compiling(layer) for name, layer in names.items() if name in COMPILED}
    layers = module("e3nn.o3", **names | products, irrep=irrep)
    layers.__path__ = []
    module("e3nn.o3._irreps", Irrep=o3.Irrep, Irreps=o3.Irreps)
    functions = module(
        "e3nn.math",
        soft_one_hot_linspace=o3.soft_one_hot_linspace,
        normalize2mom=o3.normalize2mom,
    )
    own = {name: getattr(o3, name) for name in MODULES}
    modules = module("e3nn.nn", **own)
    modules.__path__ = []
    module("e3nn.nn._gate", _Sortcut=lambda *irreps: None)
    e3nn = module(
        "e3nn",
        o3=layers,
        math=functions,
        nn=modules,
        get_optimization_defaults=lambda: dict(DEFAULTS),
        set_optimization_defaults=DEFAULTS.update,
    )
    e3nn.__path__ = [str(package)]  # where e3nn.util is
    module("opt_einsum_fx", jitable=lambda layer: layer)
    from e3nn.util import _argtools, test

    def itself(layer: Any, **options: Any) -> Any:
        return layer

    test.assert_auto_jitable = itself
    torch.jit.load = functools.partial(torch.load, weights_only=False)
    _argtools._is_irreps = lambda given: isinstance(given, o3.Irreps)  # they look for a mark


def find(checkout: Path) -> Path:
    """The clone or sdist, which has e3nn/ and tests/."""
    for folder in (checkout, *checkout.glob("e3nn-*")):
        if (folder / "tests" / FILES[0]).is_file():
            return folder
    raise SystemExit(f"{checkout} holds no tests/{FILES[0]}: name a clone or an unpacked sdist.")


def main(arguments: list[str] | None = None) -> int:
    given = options_of(__doc__, arguments)
    checkout = find(given.checkout)
    install(checkout / "e3nn")
    files = [checkout / "tests" / name for name in ("conftest.py", *FILES)]
    return run_tests(files, given.options)


if __name__ == "__main__":
    sys.exit(main())
