"""Models of MACE with interactions, products and layers of torchweft."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.e3nn import made_layer, tensor_product
from torchweft.o3.adapters.replacing import holding, is_of, replace_layers
from torchweft.o3.irreps.irreps import Irreps, join, split
from torchweft.o3.layers.symmetric_contraction import SymmetricContraction
from torchweft.o3.tensor_product.products import TensorProductConv

__all__ = ["from_mace"]


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
        if is_of("mace", "InteractionBlock", block)
        and is_of("e3nn", "TensorProduct", getattr(block, "conv_tp", None))
    ]
    if not blocks:
        raise DTypeError(
            f"from_mace was given a {type(model).__name__}: it must hold interactions of MACE with "
            "products of e3nn. Pass the model before it is scripted or turned to another library."
        )
    for block in blocks:
        conv = block.conv_tp
        block.conv_tp = holding(tensor_product(conv, _MaceConv), conv)
        block.conv_fusion = True
    replace_layers(model, _mace_contraction)
    replace_layers(model, made_layer)
    return model


class _MaceConv(TensorProductConv):
    """Called as MACE calls a convolution that is fused."""

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, edge_index: Tensor
    ) -> Tensor:
        """(N, D_out) of x (N, D1), y (E, D2), weight (E, W) and edge_index (2, E): src, dst."""
        return super().forward(x, y, weight, edge_index[0], edge_index[1])


class _MaceContraction(SymmetricContraction):
    """Called as MACE's: x is (N, C, D), elements are (N, num_elements), z is mul_ir."""

    def forward(self, x: Tensor, element: Tensor) -> Tensor:
        """(N, C · D_out)."""
        z = super().forward(x.transpose(1, 2).flatten(1), element)
        return join(split(z, self.irreps_out, "ir_mul"), "mul_ir")


def _mace_contraction(module: Any) -> nn.Module | None:
    if not is_of("mace", "SymmetricContraction", module):
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
        Irreps(module.irreps_in),
        Irreps(module.irreps_out),
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
    return holding(made, module)


def _coupling(part: Any, power: int, shape: tuple[int, ...]) -> Tensor:
    """U (2l+1, D, …, D, K) of a degree; MACE's lacks dimensions of size 1."""
    table: Tensor = getattr(part, f"U_matrix_{power}")
    return table.reshape(*shape, table.shape[-1])
