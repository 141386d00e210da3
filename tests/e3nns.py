"""torchweft.o3 beside e3nn: one description of a call, built by either, as a case to compare.

e3nn's constants have the default dtype of the moment of building, so it is set while it builds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import e3nn.io
import e3nn.math
import e3nn.nn
import e3nn.o3
import torch
from torch import Tensor, nn

from torchweft import o3
from torchweft.core.default_dtype import default_dtype
from torchweft.testing.contract import Case

__all__ = ["OURS", "THEIRS", "Forced", "Names", "Twin", "alike", "case"]

Shape = tuple[int, ...]
FACTORS = 8
"""Tables and factors that are rounded on the way to a result of either library."""


class Names:
    """The names of some modules in one place."""

    def __init__(self, *modules: Any) -> None:
        self.modules = modules

    def __getattr__(self, name: str) -> Any:
        return next(getattr(module, name) for module in self.modules if hasattr(module, name))


class Forced:
    """torchweft.o3 with a backend for every layer."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(o3, name), backend=self.backend)


OURS, THEIRS = Names(o3), Names(e3nn.o3, e3nn.nn, e3nn.math, e3nn.io)


@dataclass(frozen=True)
class Twin:
    """A call of torchweft and the same call of e3nn.

    Args:
        ours: builds a layer, or a function of tensors.
        theirs: builds the same of e3nn.
        shapes: of the inputs; None: rows of the layer's irreps, and weights that it lacks.
        lead: of the rows, where shapes are left out.
        magnitude: e3nn's sum of its terms' absolute values; None: errors are held against those of
            its float32.
    """

    ours: Callable[[], Callable[..., Tensor]]
    theirs: Callable[[], Callable[..., Tensor]]
    shapes: tuple[Shape, ...] | None = None
    lead: Shape = (5,)
    magnitude: Callable[..., Tensor] | None = None


def alike(build: Callable[[Any], Callable[..., Tensor]], *shapes: Shape, **options: Any) -> Twin:
    """What both libraries build by the same words, `build(library)`."""
    ours, theirs = (functools.partial(build, library) for library in (OURS, THEIRS))
    return Twin(ours, theirs, shapes or None, **options)


def case(name: str, twin: Twin) -> Case:
    """The twin with random numbers: e3nn is the oracle; parameters are inputs too, by name."""
    ours, theirs = _Built(twin.ours), _Built(twin.theirs)
    layer = ours(torch.float64)
    shapes = _shapes(layer, twin.lead) if twin.shapes is None else list(twin.shapes)
    own, other = (
        [(key, tuple(value.shape)) for key, value in _parameters(built(torch.float64)).items()]
        for built in (ours, theirs)
    )
    assert own == other, f"{name}: {own} are torchweft's parameters, {other} are e3nn's"
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in (*shapes, *(shape for _, shape in own))
    )
    bounded = {"polynomial": twin.magnitude is not None, "magnitude": twin.magnitude}
    return Case(name, ours.call, theirs.call, inputs, factors=FACTORS, neighbours=256, **bounded)


class _Built:
    """What a builder builds for a dtype, and a call of it."""

    def __init__(self, build: Callable[[], Callable[..., Tensor]]) -> None:
        self.build, self.made = build, {}

    def __call__(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        if dtype not in self.made:
            with default_dtype(dtype):
                made = self.build()
            self.made[dtype] = made.to(dtype) if isinstance(made, nn.Module) else made
        return self.made[dtype]

    def call(self, *inputs: Tensor, backend: None = None) -> Tensor:
        layer, dtype = self(inputs[0].dtype), inputs[0].dtype
        names = list(_parameters(layer))
        count = len(inputs) - len(names)
        with default_dtype(dtype):
            if not names:
                return layer(*inputs)
            given = dict(zip(names, inputs[count:], strict=True))
            return torch.func.functional_call(layer, given, inputs[:count])


def _parameters(layer: Any) -> dict[str, Tensor]:
    found = layer.named_parameters() if isinstance(layer, nn.Module) else ()
    return dict(sorted(found))


def _shapes(layer: Any, lead: Shape) -> list[Shape]:
    """Of rows of the irreps that a layer takes, and of weights that are none of its own."""
    choices = (("irreps_in",), ("irreps",), ("irreps_in1", "irreps_in2"))
    names = next(names for names in choices if hasattr(layer, names[0]))
    found = [(*lead, getattr(layer, name).dim) for name in names]
    if getattr(layer, "weight_numel", 0) and not layer.internal_weights:
        found.append((*(() if layer.shared_weights else lead), layer.weight_numel))
    return found
