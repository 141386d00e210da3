"""Layers of e3nn as layers of torchweft, with their weights.

Layers are found by the name of their class and read by their attributes: e3nn is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.replacing import holding, holds, is_of, replace_layers, rest_of_state
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.irreps.wigner import wigner_3j
from torchweft.o3.layers.gates_and_norms import (
    Activation,
    BatchNorm,
    Dropout,
    Gate,
    Norm,
    NormActivation,
)
from torchweft.o3.layers.harmonics_and_radial import SphericalHarmonics
from torchweft.o3.layers.linear import Linear
from torchweft.o3.layers.networks import FullyConnectedNet
from torchweft.o3.tensor_product.module import InstructedModule
from torchweft.o3.tensor_product.products import TensorProduct

__all__ = ["from_e3nn", "made_layer", "network", "tensor_product", "to_e3nn"]

Maker = Callable[[Any, str], nn.Module]
"""Makes torchweft's layer, in a layout, of one of e3nn's."""


def from_e3nn(module: nn.Module) -> nn.Module:
    """Converts a layer of e3nn, or every layer of e3nn in a model, to torchweft's.

    Args:
        module: a layer of e3nn, or a model that holds some; a model is changed in place.

    Returns:
        torchweft's layer, or the model.  Parameters are the same tensors with the same names, so
        that optimisers keep them.

    Raises:
        DTypeError: the module holds no layer that torchweft has, or one with a parametrization.
        ShapeError: a Linear with factors that its constructor does not give.

    Layers: TensorProduct and its subclasses except TensorSquare, Linear, SphericalHarmonics,
    FullyConnectedNet, Gate, Activation, Norm, NormActivation, BatchNorm and Dropout.  Like every
    module of torchweft they compile with torch.compile or torch.export, not with jit.script.

    Error: results differ from e3nn's by rounding; `o3.check` measures it for your inputs.

    Source: https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from e3nn.o3 import Linear
        >>> from torchweft import o3
        >>> original = Linear("8x0e + 8x1o", "4x0e")
        >>> o3.from_e3nn(original)
        Linear(8x0e+8x1o -> 4x0e | 32 weights)
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


def to_e3nn(module: nn.Module) -> dict[str, Tensor]:
    """The state of a converted model, in the form that the original class loads.

    Args:
        module: a model that `from_e3nn`, `from_mace`, `from_nequip` or another conversion returned.

    Returns:
        `module.state_dict()`, and the tables that the original's layers hold beside parameters, so
        that `original.load_state_dict(to_e3nn(module))` is strict.  Tables are those that the
        original had when it was converted, on the CPU; they are references, not copies.

    Raises:
        DTypeError: the module holds no layer of torchweft.

    The converted model loads this state, and the original's, too.

    Example:
        >>> from torchweft import o3
        >>> sorted(o3.to_e3nn(o3.Linear("2x0e", "2x0e")))
        ['weight']
    """
    if not holds("torchweft", module):
        raise DTypeError(
            f"to_e3nn was given a {type(module).__name__}: it must be, or hold, layers of "
            "torchweft. Pass the converted model; a model that was not converted has its state "
            "already, in state_dict()."
        )
    state: dict[str, Tensor] = module.state_dict()
    for prefix, part in module.named_modules(remove_duplicate=False):
        rest = rest_of_state(part)
        state |= {f"{prefix}.{name}" if prefix else name: table for name, table in rest.items()}
    return state


def made_layer(module: Any, layout: str = "mul_ir") -> nn.Module | None:
    """torchweft's layer for one of e3nn's, with its parameters and statistics."""
    if is_of("e3nn", "TensorSquare", module):  # it has one factor
        return None
    found = (make for name, make in _MAKERS.items() if is_of("e3nn", name, module))
    make = next(found, None)
    return None if make is None else holding(make(module, layout), module)


def tensor_product(
    module: Any, kind: type[InstructedModule] = TensorProduct, layout: str = "mul_ir"
) -> InstructedModule:
    """A product of e3nn's instructions with their factors."""
    made = kind(
        Irreps(module.irreps_in1),
        Irreps(module.irreps_in2),
        Irreps(module.irreps_out),
        [(*i[:5], i.path_weight**2) for i in module.instructions],
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=module.internal_weights,
        shared_weights=module.shared_weights,
        layout=layout,
    )
    made.take_signs([_sign(made, module, n) for n in range(len(made.instructions))])
    return made


def _sign(made: InstructedModule, module: Any, n: int) -> float:
    """The sign of e3nn's 3j symbol of an instruction by ours, which is that of e3nn 0.5 and later.

    Some symbols of an odd sum of degrees have the other sign in e3nn 0.4, which MACE requires.
    """
    items = made.recipe.operands.of(made.instructions[n])
    l1, l2, l3 = (item.ir.l for item in items)
    name = f"_w3j_{l1}_{l2}_{l3}"
    found = [table for key, table in module.state_dict().items() if key.endswith(name)]
    if not found:  # e3nn multiplies without a table where a factor or the result is scalar
        return 1.0
    own = wigner_3j(l1, l2, l3, torch.float64, "cpu")
    return math.copysign(1.0, float((found[0].cpu().double() * own).sum()))


def network(module: Any, kind: type[FullyConnectedNet] = FullyConnectedNet) -> FullyConnectedNet:
    """A network with the widths, functions, factors and parameters of e3nn's."""
    layers = list(module.children())
    for layer in layers:
        if not is_of("e3nn", "_Layer", layer):
            raise DTypeError(
                f"a FullyConnectedNet of the model holds a {type(layer).__name__}: its layers must "
                "be e3nn's own. Merge what wraps them, such as LoRA, before the model is converted."
            )
    acts = [layer.act.f for layer in layers if layer.act is not None]
    made = kind(
        module.hs,
        acts[0] if acts else None,
        layers[0].var_in if layers else 1,
        layers[-1].var_out if layers else 1,
        out_act=bool(layers) and layers[-1].act is not None,
    )
    for own, layer in zip(made.children(), layers, strict=True):
        holding(own, layer)
    return made


def _linear(module: Any, layout: str) -> nn.Module:
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
            layout=layout,
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
    return lambda of, layout: kind(
        Irreps(getattr(of, irreps)), *(getattr(of, name) for name in names), layout=layout
    )


def _gate(module: Any, layout: str) -> nn.Module:
    return Gate(
        Irreps(module.act_scalars.irreps_in),
        _functions(module.act_scalars),
        Irreps(module.act_gates.irreps_in),
        _functions(module.act_gates),
        Irreps(module.irreps_gated),
        layout=layout,
    )


def _harmonics(module: Any, layout: str) -> nn.Module:
    irreps = Irreps(module.irreps_in)
    return SphericalHarmonics(
        module._ls_list, module.normalize, module.normalization, irreps_in=irreps
    )


def _activation(module: Any, layout: str) -> nn.Module:
    return Activation(Irreps(module.irreps_in), _functions(module))


_MAKERS: dict[str, Maker] = {
    "TensorProduct": lambda module, layout: tensor_product(module, layout=layout),
    "Linear": _linear,
    "SphericalHarmonics": _harmonics,
    "FullyConnectedNet": lambda module, layout: network(module),
    "Gate": _gate,
    "Activation": _activation,
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
