"""Models of Allegro with tensor products and layers of torchweft.

Allegro's features of an edge are (E, channels, D), D the components of all irreps.  Modules here
store them as (E, D, channels), torchweft's "ir_mul", and give them as a view of Allegro's shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchweft.errors import DTypeError
from torchweft.o3.adapters.e3nn import made_layer
from torchweft.o3.adapters.replacing import all_or_nothing, holding, is_of, replace_layers
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.tensor_product.products import TensorProduct

__all__ = ["from_allegro"]


def from_allegro(model: nn.Module) -> nn.Module:
    """Converts an Allegro model: torchweft computes its tensor products and spherical harmonics.

    Args:
        model: a model of nequip-allegro, not scripted or compiled; changed in place.

    Returns:
        The model.  Its parameters are the same tensors with the same names, so that
        optimisers keep them and checkpoints load.

    Raises:
        DTypeError: the model has no Contracter of Allegro, or one with a normalisation that
            torchweft's product does not have, or with a parametrization.

    Products of all modifiers (Triton's, cuEquivariance's) are replaced too.  Scalar networks stay
    Allegro's: they are matrix products of torch.

    Error: results differ from the original's by rounding; `o3.check` measures it for your
    structure.

    Source: Musaelian et al.: Learning local equivariant representations for large-scale atomistic
    dynamics, Nature Communications 14, 579 (2023).

    Example:
        >>> from torchweft import o3
        >>> model = o3.from_allegro(model)  # doctest: +SKIP
    """
    modules = list(model.named_modules()) if isinstance(model, nn.Module) else []
    products = [(name, m) for name, m in modules if is_of("allegro", "Contracter", m)]
    if not products:
        named = type(model).__name__
        scattered = any(is_of("nequip", "TensorProductScatter", m) for _, m in modules)
        todo = "Pass it to from_nequip" if scattered else "Pass the model before it is scripted"
        raise DTypeError(
            f"from_allegro was given a {named}: it must hold Allegro's products (Contracter). "
            f"{todo}."
        )
    for name, product in products:
        _check(name, product)
    with all_or_nothing(model):
        replace_layers(model, _allegro_layer)
        replace_layers(model, made_layer)
    return model


def _check(name: str, product: Any) -> None:
    if product.irrep_normalization != "component":
        raise DTypeError(
            f"{name} is a {type(product).__name__} with irrep_normalization="
            f"{product.irrep_normalization!r}: torchweft's product has only 'component'. Build "
            "the model with that normalization, or leave it unconverted."
        )


def _allegro_layer(module: Any) -> nn.Module | None:
    if is_of("allegro", "Contracter", module):
        return holding(_Contracter(module), module)
    if is_of("allegro", "MakeWeightedChannels", module) and module.weight_individual_irreps:
        return _WeightedChannels(module).train(module.training)
    return None


class _Contracter(nn.Module):
    """z[e, u] = Σ_paths w[u, path] x1[e, u] ⊗ x2[index e, u]: Allegro's layer of this name.

    Args:
        of: the original; its weights are kept.
    """

    weights: nn.Parameter

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.mul, self.num_paths = of.mul, of.num_paths
        self.base_dim1, self.base_dim2 = of.base_dim1, of.base_dim2
        firsts, seconds, outs = (
            Irreps([(of.mul, item.ir) for item in Irreps(irreps)])
            for irreps in (of.irreps_in1, of.irreps_in2, of.irreps_out)
        )
        paths = of.instructions or [
            (i, j, k)
            for k, out in enumerate(outs)
            for i, first in enumerate(firsts)
            for j, second in enumerate(seconds)
            if out.ir in first.ir * second.ir
        ]
        self.product = TensorProduct(
            firsts,
            seconds,
            outs,
            [(*path, "uuu", True, outs[path[2]].ir.dim) for path in paths],
            irrep_normalization="none",
            path_normalization="none",
            internal_weights=False,
            shared_weights=True,
            layout="ir_mul",
        )
        self.irreps_in1, self.irreps_in2, self.irreps_out = (
            of.irreps_in1,
            of.irreps_in2,
            of.irreps_out,
        )

    def forward(self, x1: Tensor, x2: Tensor, idxs: Tensor) -> Tensor:
        """The products of the edges.

        Args:
            x1: (E, channels, D1).
            x2: (N, channels, D2).
            idxs: (E,) the row of x2 of each edge.

        Returns:
            (E, channels, D_out), a view of (E, D_out, channels).
        """
        first = _turned(x1, self.mul, self.base_dim1)
        second = _turned(x2, self.mul, self.base_dim2).index_select(0, idxs)
        z = self.product.forward(first, second, self._flat_weights())
        return z.view(z.shape[0], z.shape[1] // self.mul, self.mul).transpose(1, 2)

    def _flat_weights(self) -> Tensor:
        """(paths · channels,) of the parameter: (channels, paths), or without either dimension."""
        weights = self.weights
        if weights.dim() == 2:
            return weights.t().reshape(-1)
        if weights.shape == (self.mul,) and self.num_paths == 1:
            return weights
        return weights.view(-1, 1).expand(self.num_paths, self.mul).reshape(-1)


def _turned(x: Tensor, channels: int, components: int) -> Tensor:
    """(rows, components · channels) of (rows, channels, components)."""
    rows = x.numel() // (channels * components)  # torch finds no size of an empty tensor
    turned = x.reshape(rows, channels, components).transpose(1, 2)
    return turned.reshape(rows, components * channels)


class _WeightedChannels(nn.Module):
    """z[e, u, i] = alpha w[e, u, r] Y[e, i], r the irrep of component i: MakeWeightedChannels.

    Args:
        of: the original.
    """

    component: Tensor

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.weight_numel, self.multiplicity_out = of.weight_numel, of.multiplicity_out
        self.alpha, self._num_irreps = of.alpha, of._num_irreps
        self.register_buffer("component", of._rtoi.argmax(0), persistent=False)

    def forward(self, edge_attr: Tensor, weights: Tensor) -> Tensor:
        """(E, channels, D), a view of (E, D, channels), of harmonics (E, D) and weights."""
        w = weights.view(weights.shape[0], self.multiplicity_out, self._num_irreps).transpose(1, 2)
        y = edge_attr if self.alpha == 1 else edge_attr * self.alpha
        return (w.index_select(1, self.component) * y.unsqueeze(-1)).transpose(1, 2)
