"""Modules of e3nn as modules of weft, with their weights.

    from_e3nn(model)      every layer that weft has takes the place of e3nn's

A layer is known by the name of its class and read by its attributes: e3nn is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

from weft.errors import DTypeError, ShapeError
from weft.o3.dropout import Dropout
from weft.o3.gate import Activation, Gate
from weft.o3.irreps import Irreps
from weft.o3.linear import Linear
from weft.o3.norms import BatchNorm, Norm, NormActivation
from weft.o3.tensor_product import TensorProduct

__all__ = ["from_e3nn"]


def from_e3nn(module: nn.Module) -> nn.Module:
    """The module with every layer of e3nn in it replaced by weft's.

    Args:
        module: a layer of e3nn, or a model that holds some; a model is changed in place.

    Returns:
        weft's layer, or the model.  Parameters are the same tensors, optimisers keep them.

    Raises:
        DTypeError: there is no layer that weft knows.
        ShapeError: a Linear whose factors are none that its constructor gives.

    Known are TensorProduct and what derives from it but TensorSquare, Linear, Gate, Activation,
    Norm, NormActivation, BatchNorm and Dropout.
    """
    made = _made(module)
    if made is not None:
        return made
    if not isinstance(module, nn.Module) or not _replace(module):
        raise DTypeError(
            f"from_e3nn was given a {type(module).__name__}: it must be, or hold, layers of e3nn: "
            f"{', '.join(_MAKERS)}. Pass the model that was built with e3nn."
        )
    return module


def _replace(module: nn.Module) -> int:
    """Replace the layers inside; how many."""
    count = 0
    for name, child in list(module.named_children()):
        made = _made(child)
        if made is not None:
            setattr(module, name, made)
        count += _replace(child) if made is None else 1
    return count


def _made(module: Any) -> nn.Module | None:
    """weft's layer for one of e3nn's, with its parameters and statistics."""
    make = _maker(type(module))
    if make is None:
        return None
    made = make(module)
    tensors = chain(module.parameters(), module.buffers())
    made.to(next((t.device for t in tensors), None))
    for name, parameter in module.named_parameters(recurse=False):
        made.register_parameter(name, parameter)
    for name in ("running_mean", "running_var"):
        if getattr(module, name, None) is not None:
            made.register_buffer(name, getattr(module, name))
    return made.train(module.training)


def _maker(kind: type) -> Callable[[Any], nn.Module] | None:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "e3nn":
            if base.__name__ == "TensorSquare":  # it has one factor
                return None
            if base.__name__ in _MAKERS:
                return _MAKERS[base.__name__]
    return None


def _irreps(given: object) -> Irreps:
    return Irreps(str(given))


def _tensor_product(module: Any) -> nn.Module:
    return TensorProduct(
        _irreps(module.irreps_in1),
        _irreps(module.irreps_in2),
        _irreps(module.irreps_out),
        [(*i[:5], i.path_weight**2) for i in module.instructions],
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=module.internal_weights,
        shared_weights=module.shared_weights,
    )


def _linear(module: Any) -> nn.Module:
    irreps, out = _irreps(module.irreps_in), _irreps(module.irreps_out)
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
        "something else here. Build weft's Linear, and scale the weights."
    )


def _functions(activation: Any) -> list[Any]:
    return [None if act is None else act.f for act in activation.acts]


def _activation(module: Any) -> nn.Module:
    return Activation(_irreps(module.irreps_in), _functions(module))


def _gate(module: Any) -> nn.Module:
    return Gate(
        _irreps(module.act_scalars.irreps_in),
        _functions(module.act_scalars),
        _irreps(module.act_gates.irreps_in),
        _functions(module.act_gates),
        _irreps(module.irreps_gated),
    )


def _norm(module: Any) -> nn.Module:
    return Norm(_irreps(module.irreps_in), module.squared)


def _norm_activation(module: Any) -> nn.Module:
    return NormActivation(
        _irreps(module.irreps_in),
        module.scalar_nonlinearity,
        module.normalize,
        module.epsilon,
        module.bias,
    )


def _batch_norm(module: Any) -> nn.Module:
    return BatchNorm(
        _irreps(module.irreps),
        module.eps,
        module.momentum,
        module.affine,
        module.reduce,
        module.instance,
        module.include_bias,
        module.normalization,
    )


def _dropout(module: Any) -> nn.Module:
    return Dropout(_irreps(module.irreps), module.p)


_MAKERS: dict[str, Callable[[Any], nn.Module]] = {
    "TensorProduct": _tensor_product,
    "Linear": _linear,
    "Gate": _gate,
    "Activation": _activation,
    "Norm": _norm,
    "NormActivation": _norm_activation,
    "BatchNorm": _batch_norm,
    "Dropout": _dropout,
}
