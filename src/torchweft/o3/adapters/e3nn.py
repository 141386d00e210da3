"""Layers of e3nn as layers of torchweft, with their weights.

Layers are found by the name of their class and read by their attributes: e3nn is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.replacing import Maker, holding, is_of, replace_layers
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.layers.gates_and_norms import (
    Activation,
    BatchNorm,
    Dropout,
    Gate,
    Norm,
    NormActivation,
)
from torchweft.o3.layers.linear import Linear
from torchweft.o3.tensor_product.module import InstructedModule
from torchweft.o3.tensor_product.products import TensorProduct

__all__ = ["from_e3nn", "made_layer", "tensor_product"]


def from_e3nn(module: nn.Module) -> nn.Module:
    """The module with every layer of e3nn in it replaced by torchweft's.

    Args:
        module: a layer of e3nn, or a model that holds some; a model is changed in place.

    Returns:
        torchweft's layer, or the model.  Parameters are the same tensors, optimisers keep them.

    Raises:
        DTypeError: there is no layer that torchweft has.
        ShapeError: a Linear with factors that its constructor does not give.

    Layers: TensorProduct and what derives from it but TensorSquare, Linear, Gate, Activation,
    Norm, NormActivation, BatchNorm and Dropout.
    """
    made = made_layer(module)
    if made is not None:
        return made
    if not isinstance(module, nn.Module) or not replace_layers(module, made_layer):
        raise DTypeError(
            f"from_e3nn was given a {type(module).__name__}: it must be, or hold, layers of e3nn: "
            f"{', '.join(_MAKERS)}. Pass the model that was built with e3nn."
        )
    return module


def made_layer(module: Any) -> nn.Module | None:
    """torchweft's layer for one of e3nn's, with its parameters and statistics."""
    if is_of("e3nn", "TensorSquare", module):  # it has one factor
        return None
    found = (make for name, make in _MAKERS.items() if is_of("e3nn", name, module))
    make = next(found, None)
    return None if make is None else holding(make(module), module)


def tensor_product(module: Any, kind: type[InstructedModule] = TensorProduct) -> InstructedModule:
    """A product of e3nn's instructions with their factors."""
    return kind(
        Irreps(module.irreps_in1),
        Irreps(module.irreps_in2),
        Irreps(module.irreps_out),
        [(*i[:5], i.path_weight**2) for i in module.instructions],
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=module.internal_weights,
        shared_weights=module.shared_weights,
    )


def _linear(module: Any) -> nn.Module:
    irreps, out = Irreps(module.irreps_in), Irreps(module.irreps_out)
    paths = [i for i in module.instructions if i.i_in >= 0]
    biased = {i.i_out for i in module.instructions if i.i_in < 0}
    f_in, f_out = module.weight.shape[:2] if module.weight.dim() == 3 else (None, None)
    for normalization in ("element", "path"):
        made = Linear(
            irreps,
            out,
            f_in=f_in,
            f_out=f_out,
            internal_weights=module.internal_weights,
            shared_weights=module.shared_weights,
            instructions=[(i.i_in, i.i_out) for i in paths],
            biases=[k in biased for k in range(len(out))],
            path_normalization=normalization,
        )
        pairs = zip(made.instructions, paths, strict=False)
        if all(abs(own.path_weight - i.path_weight) < 1e-12 for own, i in pairs):
            return made
    raise ShapeError(
        f"{module} has factors that neither path_normalization gives: its weights would mean "
        "something else here. Build torchweft's Linear, and scale the weights."
    )


def _functions(activation: Any) -> list[Any]:
    return [None if act is None else act.f for act in activation.acts]


def _of_attributes(kind: Callable[..., nn.Module], irreps: str, *names: str) -> Maker:
    """A maker of layers whose constructor takes attributes of e3nn's in this order."""
    return lambda of: kind(Irreps(getattr(of, irreps)), *(getattr(of, name) for name in names))


def _gate(module: Any) -> nn.Module:
    return Gate(
        Irreps(module.act_scalars.irreps_in),
        _functions(module.act_scalars),
        Irreps(module.act_gates.irreps_in),
        _functions(module.act_gates),
        Irreps(module.irreps_gated),
    )


_MAKERS: dict[str, Maker] = {
    "TensorProduct": tensor_product,
    "Linear": _linear,
    "Gate": _gate,
    "Activation": lambda module: Activation(Irreps(module.irreps_in), _functions(module)),
    "Norm": _of_attributes(Norm, "irreps_in", "squared"),
    "NormActivation": _of_attributes(
        NormActivation, "irreps_in", "scalar_nonlinearity", "normalize", "epsilon", "bias"
    ),
    "BatchNorm": _of_attributes(
        BatchNorm, "irreps", "eps", "momentum", "affine", "reduce", "instance", "include_bias",
        "normalization",
    ),
    "Dropout": _of_attributes(Dropout, "irreps", "p"),
}  # fmt: skip
