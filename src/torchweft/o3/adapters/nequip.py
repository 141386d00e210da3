"""Models of NequIP with products, sums, networks and layers of torchweft."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.operators.operator import compiling
from torchweft.errors import DTypeError
from torchweft.o3.adapters.e3nn import made_layer, tensor_product
from torchweft.o3.adapters.interactions import (
    RadialWeight,
    by_types,
    convolved,
    layout_in,
    linear_of_items,
    radial_weight,
    self_connection,
)
from torchweft.o3.adapters.model_call import Call
from torchweft.o3.adapters.replacing import all_or_nothing, holding, is_of, replace_layers
from torchweft.o3.adapters.sources import Current, extended, given_rows, mark_reads_sources
from torchweft.o3.graph import Graph, graph_of
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.layers.harmonics_and_radial import BesselBasis, PolynomialCutoff
from torchweft.o3.tensor_product.products import TensorProductConv

__all__ = ["from_nequip"]

BESSEL_FACTOR = 1 / (math.sqrt(2) * math.pi)
"""NequIP's Bessel functions by ours of r_max = 1."""


def from_nequip(model: nn.Module) -> nn.Module:
    """Converts a NequIP model: torchweft computes its interactions and layers.

    The gather, product and sum of each layer become one convolution, which takes the last matrix of
    the radial network where that is faster; self-connections become linear maps chosen by the type
    of an atom.

    Args:
        model: a model of nequip, not scripted or compiled; changed in place.

    Returns:
        The model.  Its parameters are the same tensors with the same names, so that
        optimisers keep them and checkpoints load.

    Raises:
        DTypeError: the model has no TensorProductScatter of NequIP, or a layer of e3nn with a
            parametrization.

    Error: results differ from the original's by rounding; `o3.check` measures it for your
    structure.

    Source: Batzner et al.: E(3)-equivariant graph neural networks for data-efficient and accurate
    interatomic potentials, Nature Communications 13, 2453 (2022).

    Note:
        With self-connections by type, columns of `node_attrs` in the data are the types, integers,
        not their embedding.

    Example:
        >>> from torchweft import o3
        >>> model = o3.from_nequip(model)  # doctest: +SKIP
        >>> atoms.calc = o3.calculator(model)  # doctest: +SKIP
    """
    _check(model)
    with all_or_nothing(model):
        _convert(model)
    return model


def _convert(model: Any) -> None:
    blocks: list[Any] = [b for b in model.modules() if is_of("nequip", "InteractionBlock", b)]
    features = [x for b in blocks for x in (b.linear_1.irreps_in, b.linear_2.irreps_out)]
    layout, call = layout_in(model, "nequip", features), Call()
    if any(is_of("nequip", "NodeTensorEmbed", module) for module in model.modules()):
        layout = "mul_ir"  # it appends tensors to the first features
    else:
        _connect_by_type(model, blocks, layout)
    for block in blocks:
        if _is_radial(getattr(block, "edge_mlp", None)):
            block.edge_mlp = _RadialNetwork(block.edge_mlp).train(block.training)
        if layout == "ir_mul":
            items = Irreps(block.tp_scatter.tp.irreps_out)
            block.linear_2 = linear_of_items(block.linear_2, items, layout)
        edges = _Edges(call)
        block.register_forward_pre_hook(edges)
        replace_layers(block, functools.partial(_nequip_scatter, layout=layout, edges=edges))
    replace_layers(model, functools.partial(_nequip_scatter, layout=layout, edges=_Edges(call)))
    replace_layers(model, _radial_layer)
    replace_layers(model, functools.partial(made_layer, layout=layout))
    if blocks:
        model.register_forward_pre_hook(call.begin, with_kwargs=True)
        model.register_forward_hook(call.end, always_call=True)
        _read_sources(model, blocks)


def _check(model: Any) -> None:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(is_of("nequip", "TensorProductScatter", module) for module in modules):
        return
    named = type(model).__name__
    if any(is_of("allegro", "Contracter", module) for module in modules):
        raise DTypeError(
            f"from_nequip was given a {named} with products of Allegro: it must hold layers "
            "TensorProductScatter of NequIP. Pass it to from_allegro."
        )
    raise DTypeError(
        f"from_nequip was given a {named}: it must hold layers TensorProductScatter of NequIP. "
        "Pass the loaded model before it is scripted or compiled; a model whose products and sums "
        "are apart, as in NequIP before 0.7, goes to from_e3nn."
    )


class _Edges:
    """A hook of an interaction: the graph of its data, which layers of a call share.

    Args:
        call: of the model.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.edge_index: Tensor | None = None

    def __call__(self, block: nn.Module, args: Any) -> None:
        """Before the forward pass of the interaction; compiled code sorts equal edges once."""
        if not compiling():
            self.edge_index = args[0]["edge_index"]

    def graph(self, edge_src: Tensor, edge_dst: Tensor, x: Tensor) -> Graph:
        """The graph of the interaction's edges; of these ones where it was not called."""
        edge_index, self.edge_index = self.edge_index, None
        sizes = given_rows(x), x.shape[0]
        if edge_index is None:
            return graph_of(edge_src, edge_dst, *sizes)
        return self.call.graph(edge_index, *sizes, src=1)


class _NequipScatter(nn.Module):
    """NequIP's layer of this name; its product is `tp` there too.

    Args:
        tp: the convolution.
        edges: of the interaction that calls it.
    """

    def __init__(self, tp: TensorProductConv, edges: _Edges) -> None:
        super().__init__()
        self.tp, self.edges = tp, edges

    def forward(
        self,
        x: Tensor,
        edge_attr: Tensor,
        edge_weight: Tensor | RadialWeight,
        edge_dst: Tensor,
        edge_src: Tensor,
    ) -> Tensor:
        """(N, D_out) of x (N, D1) and, for each edge, harmonics, weights and nodes."""
        graph = self.edges.graph(edge_src, edge_dst, x)
        return convolved(self.tp, x, edge_attr, edge_weight, graph)


class _RadialEncoding(nn.Module):
    """NequIP's BesselEdgeLengthEncoding: sin(nπx) / (πx) times a cutoff, x the length by r_max.

    Args:
        of: the original, with frequencies that are not trained.
        cutoff: torchweft's, of x.
    """

    def __init__(self, of: Any, cutoff: PolynomialCutoff) -> None:
        super().__init__()
        self.basis, self.cutoff = BesselBasis(1.0, of.num_bessels), cutoff
        self.edge_invariant_field, self.norm_length_field = (
            of.edge_invariant_field,
            of.norm_length_field,
        )
        self.irreps_in, self.irreps_out = of.irreps_in, of.irreps_out
        self._output_dtype = of._output_dtype

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """The data with the cutoff (E, 1) and the radial functions (E, num_bessels)."""
        x = data[self.norm_length_field]
        bessel = (self.basis(x) * BESSEL_FACTOR).to(self._output_dtype)
        data["edge_cutoff"] = self.cutoff(x).to(self._output_dtype)
        data[self.edge_invariant_field] = bessel * data["edge_cutoff"]
        return data


def _radial_layer(module: Any) -> nn.Module | None:
    """torchweft's layer for NequIP's functions of lengths."""
    if is_of("nequip", "PolynomialCutoff", module) and module.p == int(module.p):
        return holding(PolynomialCutoff(1.0, int(module.p)), module)
    if not is_of("nequip", "BesselEdgeLengthEncoding", module) or module.trainable:
        return None
    cutoff = _radial_layer(module.cutoff)
    if not isinstance(cutoff, PolynomialCutoff):
        return None
    return holding(_RadialEncoding(module, cutoff), module)


def _nequip_scatter(module: Any, layout: str, edges: _Edges) -> nn.Module | None:
    if not is_of("nequip", "TensorProductScatter", module):
        return None
    conv = tensor_product(module.tp, TensorProductConv, layout)
    assert isinstance(conv, TensorProductConv)
    holding(conv, module.tp)
    return _NequipScatter(conv, edges).train(module.training)


class _RadialNetwork(nn.Module):
    """NequIP's ScalarMLPFunction, with the last matrix apart.

    Args:
        network: the original; its layers are kept.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.mlp = network.mlp
        self._factors = [_factor(layer) for layer in self.mlp if hasattr(layer, "alpha")]

    def forward(self, x: Tensor) -> Tensor | RadialWeight:
        """Weights of the edges, of radial functions x (E, basis)."""
        return radial_weight(self, x)

    def hidden(self, x: Tensor) -> Tensor:
        """(E, H): what the last matrix is applied to."""
        factors = iter(self._factors)
        for layer in self.mlp[:-1]:
            x = x @ (layer.weight * next(factors)) if hasattr(layer, "alpha") else layer(x)
        return x

    def last_matrix(self) -> Tensor:
        """(H, weight_numel)."""
        matrix: Tensor = self.mlp[-1].weight * self._factors[-1]
        return matrix


def _is_radial(network: Any) -> bool:
    """Whether it is a network of matrices without biases that ends in one."""
    if not is_of("nequip", "ScalarMLPFunction", network) or network.bias:
        return False
    return isinstance(network.mlp, nn.Sequential) and hasattr(network.mlp[-1], "alpha")


def _factor(layer: Any) -> float:
    """The number by which a layer's weight is multiplied, which its buffer holds rounded."""
    rounded = float(layer.alpha)
    for gain in (1.0, math.sqrt(2)):
        for width in (layer.in_features, layer.out_features):
            exact = gain / math.sqrt(width)
            if abs(exact - rounded) <= torch.finfo(torch.float32).eps * exact:
                return exact
    return rounded


def _connect_by_type(model: nn.Module, blocks: list[Any], layout: str) -> None:
    """Replace self-connections where all attributes of the nodes are embedded types."""
    embeddings: list[Any] = [m for m in model.modules() if is_of("nequip", "NodeTypeEmbed", m)]
    connected = [block for block in blocks if getattr(block, "sc", None) is not None]
    if len(embeddings) != 1 or not connected:
        return
    (embed,) = embeddings
    if getattr(embed, "do_categorical_graph_field_embed", False):
        return
    width = Irreps(f"{embed.embed_module.weight.shape[1]}x0e")
    if not all(by_types(b.sc) and Irreps(b.sc.irreps_in2) == width for b in connected):
        return
    for block in connected:
        block.sc = self_connection(block.sc, embed.embed_module, layout)
    replace_layers(model, lambda m: _TypeEmbed(m).train(m.training) if m is embed else None)


class _TypeEmbed(nn.Module):
    """NequIP's NodeTypeEmbed, with the types themselves as attributes of the nodes.

    Args:
        embed: the original; its embedding is kept.
    """

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.embed_module, self.set_features = embed.embed_module, embed.set_features
        self.irreps_in, self.irreps_out = embed.irreps_in, embed.irreps_out

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """The data with `node_attrs` (N, width), columns of types, and `node_features`."""
        types = data["atom_types"].view(-1)
        width = self.embed_module.weight.shape[1]
        data["node_attrs"] = types.unsqueeze(1).expand(-1, width)  # of the shape that NequIP checks
        if self.set_features:
            data["node_features"] = self.embed_module(types)
        return data


class _Local(NamedTuple):
    """What NequIP reads of LAMMPS where data has rows of other ranks: the number of own rows."""

    nlocal: int


def _read_sources(model: Any, blocks: list[Any]) -> None:
    """Let interactions read rows of others, where NequIP has a place for them.

    NequIP (from 0.13 on) computes with own rows, and rows of others behind them, where LAMMPS
    spreads atoms over processes: types, positions and the features of each layer but the first.
    """
    networks = [m for m in model.modules() if is_of("nequip", "SequentialGraphNetwork", m)]
    embeddings = [m for m in model.modules() if hasattr(m, "embed_module")]
    of_types = all(not getattr(m, "do_categorical_graph_field_embed", False) for m in embeddings)
    tensors = any(is_of("nequip", "NodeTensorEmbed", module) for module in model.modules())
    exchanges = all(hasattr(block, "ghost_exchange") for block in blocks)
    if not networks or not of_types or tensors or not exchanges:
        return
    networks[0].register_forward_pre_hook(_extend_data)
    networks[0].register_forward_hook(_restore_data)
    for block in blocks:
        block.ghost_exchange.register_forward_hook(_extend_features)
    mark_reads_sources(model)


_LOCAL = "lmp_mliap_data"
"""NequIP's name of what it reads of LAMMPS."""

_GIVEN = "torchweft_given_rows"


def _extend_data(network: nn.Module, args: Any) -> Any:
    """Types and positions of all rows that edges read."""
    if Current.sources is None:
        return None
    data = dict(args[0])
    given = {name: data[name] for name in ("pos", "atom_types")}
    data |= {name: extended(rows) for name, rows in given.items()}
    return data | {_LOCAL: _Local(Current.sources.num_rows), _GIVEN: given}


def _restore_data(network: nn.Module, args: Any, data: Any) -> Any:
    """The data with the rows that the model was given."""
    if Current.sources is None:
        return None
    rest = {name: value for name, value in data.items() if name not in (_LOCAL, _GIVEN)}
    return rest | data[_GIVEN]


def _extend_features(exchange: Any, args: Any, data: Any) -> Any:
    """Features of all rows that edges read."""
    if Current.sources is None:
        return None
    return data | {exchange.field: extended(data[exchange.field])}
