"""Models of NequIP with products, sums and layers of torchweft."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchweft.errors import DTypeError
from torchweft.o3.adapters.e3nn import made_layer, tensor_product
from torchweft.o3.adapters.replacing import holding, is_of, replace_layers
from torchweft.o3.tensor_product.products import TensorProductConv

__all__ = ["from_nequip"]


def from_nequip(model: nn.Module) -> nn.Module:
    """A model of NequIP with its tensor products and sums by torchweft, and from_e3nn's layers.

    Args:
        model: not scripted or compiled; changed in place.

    Returns:
        The model.  Parameters are the same tensors, and have the same names.

    Raises:
        DTypeError: it has no TensorProductScatter of NequIP.
    """
    if not isinstance(model, nn.Module) or not replace_layers(model, _nequip_scatter):
        raise DTypeError(
            f"from_nequip was given a {type(model).__name__}: it must hold layers "
            "TensorProductScatter of NequIP. Pass the model before it is scripted or compiled; "
            "where products and sums are apart, as in older versions, use from_e3nn."
        )
    replace_layers(model, made_layer)
    return model


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
    if not is_of("nequip", "TensorProductScatter", module):
        return None
    return _NequipScatter(holding(tensor_product(module.tp, TensorProductConv), module.tp))
