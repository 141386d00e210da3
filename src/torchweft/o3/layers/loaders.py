"""Modules of e3nn, MACE and NequIP as modules of torchweft, with their weights.

    from_e3nn(model)      every layer that torchweft has takes the place of e3nn's
    from_mace(model)      and gathers, products and sums over edges become one convolution, MACE's
                          symmetric contractions torchweft's
    from_nequip(model)    gathers, products and sums of NequIP become one convolution

Layers are found by the name of their class and read by their attributes: no library is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import Irreps, join, split
from torchweft.o3.layers.gates_and_norms import (
    Activation,
    BatchNorm,
    Dropout,
    Gate,
    Norm,
    NormActivation,
)
from torchweft.o3.layers.linear import Linear
from torchweft.o3.layers.symmetric_contraction import SymmetricContraction
from torchweft.o3.tensor_product.module import InstructedModule
from torchweft.o3.tensor_product.products import TensorProduct, TensorProductConv

__all__ = ["from_e3nn", "from_mace", "from_nequip"]

Maker = Callable[[Any], nn.Module]
"""Makes torchweft's layer of one of e3nn."""


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
    made = _made(module)
    if made is not None:
        return made
    if not isinstance(module, nn.Module) or not _replace(module, _made):
        raise DTypeError(
            f"from_e3nn was given a {type(module).__name__}: it must be, or hold, layers of e3nn: "
            f"{', '.join(_MAKERS)}. Pass the model that was built with e3nn."
        )
    return module


def from_mace(model: nn.Module) -> nn.Module:
    """A model of MACE with its interactions and products by torchweft, and from_e3nn's layers.

    Args:
        model: not scripted, with e3nn's products; changed in place.

    Returns:
        The model.  Parameters are the same tensors, and have the same names.

    Raises:
        DTypeError: it has no interaction of MACE with a product of e3nn.
        ShapeError: a symmetric contraction of other degrees for other irreps, or whose couplings
            are not equivariant in e3nn's basis.

    An interaction's `conv_tp` then takes nodes, edges, weights and edge_index, as MACE calls it
    where a convolution is fused.  A SymmetricContraction keeps the couplings that the model has.
    """
    blocks: list[Any] = [
        block
        for block in (model.modules() if isinstance(model, nn.Module) else ())
        if _is_of("mace", "InteractionBlock", block)
        and _is_of("e3nn", "TensorProduct", getattr(block, "conv_tp", None))
    ]
    if not blocks:
        raise DTypeError(
            f"from_mace was given a {type(model).__name__}: it must hold interactions of MACE with "
            "products of e3nn. Pass the model before it is scripted or turned to another library."
        )
    for block in blocks:
        conv = block.conv_tp
        block.conv_tp = _holding(_tensor_product(conv, _MaceConv), conv)
        block.conv_fusion = True
    _replace(model, _mace_contraction)
    _replace(model, _made)
    return model


def from_nequip(model: nn.Module) -> nn.Module:
    """A model of NequIP with its tensor products and sums by torchweft, and from_e3nn's layers.

    Args:
        model: not scripted or compiled; changed in place.

    Returns:
        The model.  Parameters are the same tensors, and have the same names.

    Raises:
        DTypeError: it has no TensorProductScatter of NequIP.
    """
    if not isinstance(model, nn.Module) or not _replace(model, _nequip_scatter):
        raise DTypeError(
            f"from_nequip was given a {type(model).__name__}: it must hold layers "
            "TensorProductScatter of NequIP. Pass the model before it is scripted or compiled; "
            "where products and sums are apart, as in older versions, use from_e3nn."
        )
    _replace(model, _made)
    return model


def _replace(module: nn.Module, make: Callable[[Any], nn.Module | None]) -> int:
    """Replace the modules for which `make` returns another; returns their number."""
    count = 0
    for name, child in list(module.named_children()):
        made = make(child)
        if made is not None:
            setattr(module, name, made)
        count += _replace(child, make) if made is None else 1
    return count


def _is_of(package: str, name: str, module: object) -> bool:
    """Whether a class of another package is the module's class or a base of it."""
    return any(
        base.__module__.partition(".")[0] == package and base.__name__ == name
        for base in type(module).__mro__
    )


def _made(module: Any) -> nn.Module | None:
    """torchweft's layer for one of e3nn's, with its parameters and statistics."""
    if _is_of("e3nn", "TensorSquare", module):  # it has one factor
        return None
    found = (make for name, make in _MAKERS.items() if _is_of("e3nn", name, module))
    make = next(found, None)
    return None if make is None else _holding(make(module), module)


def _holding(made: nn.Module, module: nn.Module) -> nn.Module:
    """`made` with the parameters, statistics, device and mode of another module."""
    tensors = chain(module.parameters(), module.buffers())
    made.to(next((t.device for t in tensors), None))
    for name, parameter in module.named_parameters(recurse=False):
        made.register_parameter(name, parameter)
    for name in ("running_mean", "running_var"):
        if getattr(module, name, None) is not None:
            made.register_buffer(name, getattr(module, name))
    return made.train(module.training)


def _irreps(given: object) -> Irreps:
    return Irreps(str(given))


def _tensor_product(module: Any, kind: type[InstructedModule] = TensorProduct) -> InstructedModule:
    """A product of e3nn's instructions with their factors."""
    return kind(
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
        "something else here. Build torchweft's Linear, and scale the weights."
    )


def _functions(activation: Any) -> list[Any]:
    return [None if act is None else act.f for act in activation.acts]


def _of_attributes(kind: Callable[..., nn.Module], irreps: str, *names: str) -> Maker:
    """A maker of layers whose constructor takes attributes of e3nn's in this order."""
    return lambda of: kind(_irreps(getattr(of, irreps)), *(getattr(of, name) for name in names))


def _gate(module: Any) -> nn.Module:
    return Gate(
        _irreps(module.act_scalars.irreps_in),
        _functions(module.act_scalars),
        _irreps(module.act_gates.irreps_in),
        _functions(module.act_gates),
        _irreps(module.irreps_gated),
    )


_MAKERS: dict[str, Maker] = {
    "TensorProduct": _tensor_product,
    "Linear": _linear,
    "Gate": _gate,
    "Activation": lambda module: Activation(_irreps(module.irreps_in), _functions(module)),
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


class _MaceConv(TensorProductConv):
    """Called as MACE calls a convolution that is fused."""

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, edge_index: Tensor
    ) -> Tensor:
        """(N, D_out) of x (N, D1), y (E, D2), weight (E, W) and edge_index (2, E): src, dst."""
        return super().forward(x, y, weight, edge_index[0], edge_index[1])


class _NequipScatter(nn.Module):
    """NequIP's layer of this name; its product is `tp` there too.

    Args:
        tp: the convolution.
    """

    def __init__(self, tp: nn.Module) -> None:
        super().__init__()
        self.tp = tp

    def forward(
        self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor
    ) -> Tensor:
        """(N, D_out) of x (N, D1) and, for each edge, harmonics, weights and nodes."""
        found: Tensor = self.tp(x, edge_attr, edge_weight, edge_src, edge_dst)
        return found


def _nequip_scatter(module: Any) -> nn.Module | None:
    if not _is_of("nequip", "TensorProductScatter", module):
        return None
    return _NequipScatter(_holding(_tensor_product(module.tp, TensorProductConv), module.tp))


class _MaceContraction(SymmetricContraction):
    """Called as MACE's: x is (N, C, D), elements are (N, num_elements), z is mul_ir."""

    def forward(self, x: Tensor, element: Tensor) -> Tensor:
        """(N, C · D_out)."""
        z = super().forward(x.transpose(1, 2).flatten(1), element)
        return join(split(z, self.irreps_out, "ir_mul"), "mul_ir")


def _mace_contraction(module: Any) -> nn.Module | None:
    if not _is_of("mace", "SymmetricContraction", module):
        return None
    parts = list(module.contractions)
    degrees = {part.correlation for part in parts}
    if len(degrees) > 1:
        raise ShapeError(
            f"the symmetric contraction has the degrees {sorted(degrees)} for different irreps: "
            "torchweft's has one for all. Give the model one correlation."
        )
    (degree,) = degrees
    made = _MaceContraction(
        _irreps(module.irreps_in),
        _irreps(module.irreps_out),
        degree,
        parts[0].weights_max.shape[0],
        layout="ir_mul",
    )
    for own, part in zip(made.contractions, parts, strict=True):
        own.weights_max, own.weights = part.weights_max, part.weights
    size = sum(item.ir.dim for item in made.irreps_in)
    made.take_couplings(
        [
            [
                _coupling(part, power, (item.ir.dim, *power * (size,)))
                for part, item in zip(parts, made.irreps_out, strict=True)
            ]
            for power in range(1, degree + 1)
        ]
    )
    return _holding(made, module)


def _coupling(part: Any, power: int, shape: tuple[int, ...]) -> Tensor:
    """U (2l+1, D, …, D, K) of a degree; MACE's lacks dimensions of size 1."""
    table: Tensor = getattr(part, f"U_matrix_{power}")
    return table.reshape(*shape, table.shape[-1])
