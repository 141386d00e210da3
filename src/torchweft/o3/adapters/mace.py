"""Models of MACE with interactions, products and layers of torchweft."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.e3nn import made_layer, network, tensor_product
from torchweft.o3.adapters.interactions import MapByElement, by_elements, leaves_factors
from torchweft.o3.adapters.mace_forward import (
    DIVIDED,
    MaceForward,
    MaceInteraction,
    forward_serves,
    rows_of_e3nn,
)
from torchweft.o3.adapters.mace_repulsion import repulsion
from torchweft.o3.adapters.model_call import Call
from torchweft.o3.adapters.replacing import (
    all_or_nothing,
    check_parameters,
    holding,
    is_of,
    naming,
    replace_layers,
)
from torchweft.o3.adapters.sources import extended, given_rows, mark_reads_sources
from torchweft.o3.irreps.irreps import Irreps, join, split
from torchweft.o3.layers.harmonics_and_radial import BesselBasis, PolynomialCutoff, RadialBasis
from torchweft.o3.layers.networks import FullyConnectedNet
from torchweft.o3.layers.symmetric_contraction import SymmetricContraction
from torchweft.o3.tensor_product.products import TensorProduct, TensorProductConv

__all__ = ["from_mace"]

MODELS = (
    "MACE",
    "ScaleShiftMACE",
    "AtomicDipolesMACE",
    "AtomicDielectricMACE",
    "EnergyDipolesMACE",
)
"""Models in which no layer but those that are replaced reads components: rows are ir_mul there."""

LINEAR = ("node_embedding", "atomic_energies_fn")
"""Parts of a model that are linear in the attributes of nodes: rows of NaN make results NaN."""


def from_mace(model: nn.Module) -> nn.Module:
    """Converts a MACE model: torchweft computes its interactions, products and e3nn layers.

    Args:
        model: a model of mace-torch with e3nn's products, not scripted; changed in place.

    Returns:
        The model.  Its parameters are the same tensors with the same names, so that optimisers keep
        them and checkpoints load.  Where the attributes of nodes are one-hot and need no gradient,
        weights are chosen by element, not multiplied.  A function that `torchweft.capture` has
        recorded with such attributes returns NaN for a structure with others.

    Raises:
        DTypeError: the model has no interaction of MACE with a product of e3nn, or a layer with
            LoRA or a parametrization.
        ShapeError: a symmetric contraction of other degrees for other irreps, or with couplings
            that are not equivariant in e3nn's basis; the text names it, and the model stays as it
            was.

    The model's inputs and outputs are as before; inside, rows have the layout "ir_mul".  `conv_tp`
    of an interaction then takes nodes, edges, weights and edge_index, as MACE calls it where a
    convolution is fused, and its `conv_tp_weights` returns what the last matrix of the network is
    applied to: on a GPU the weights of all edges are never stored.  A SymmetricContraction keeps
    the couplings that the model has.

    MACE and ScaleShiftMACE models get a forward pass of few operations, the attribute
    `model.forward`, which leaves positions and shifts in the data as they are.  Hessians, forces or
    stresses of edges and atoms, LAMMPS, a displacement in the data, and models with embeddings of
    more features take the forward pass of MACE.  Hooks of a layer move to the layer that replaces
    it, and see its rows.  Parts of a replaced layer, and `scale_shift`, are not called any more:
    their hooks are not, either.

    The model compiles with torch.compile, or torch.export and AOTInductor.  Where a program asks
    for TorchScript, script a model of the original class after
    `load_state_dict(torchweft.o3.to_e3nn(model))`.

    Error: results differ from the original's by rounding; `o3.check` measures it for your
    structure.

    Cost: seconds.  The first call of the model on a GPU compiles its kernels.

    Source: Batatia et al.: MACE: higher order equivariant message passing neural networks for fast
    and accurate force fields, NeurIPS 2022.

    Example:
        >>> from torchweft import o3
        >>> model = torch.load("my.model", weights_only=False)  # doctest: +SKIP
        >>> model = o3.from_mace(model)  # doctest: +SKIP
        >>> atoms.calc = o3.calculator(model)  # doctest: +SKIP
    """
    if not any(map(_is_unconverted, model.modules() if isinstance(model, nn.Module) else ())):
        raise DTypeError(
            f"from_mace was given a {type(model).__name__}: it must hold interactions of MACE with "
            "products of e3nn. Pass the loaded model before it is scripted or converted otherwise."
        )
    with all_or_nothing(model):
        for part in list(model.modules()):
            if is_of("mace", type(part).__name__, part) and hasattr(part, "interactions"):
                _convert(part, "ir_mul" if type(part).__name__ in MODELS else "mul_ir")
        _convert(model, "mul_ir")  # interactions without such a model around them
    return model


def _is_unconverted(block: nn.Module) -> bool:
    """Whether a module is an interaction of MACE with a product of e3nn."""
    return is_of("mace", "InteractionBlock", block) and is_of(
        "e3nn", "TensorProduct", getattr(block, "conv_tp", None)
    )


def _convert(model: Any, layout: str) -> None:
    """Replace the layers of a model, which then has rows of this layout."""
    blocks = [(name, block) for name, block in model.named_modules() if _is_unconverted(block)]
    if not blocks:
        return
    call = Call()
    replace_layers(model, functools.partial(_mace_layer, layout=layout, call=call))
    for name, block in blocks:
        with naming(name):
            _convert_interaction(block, layout, call)
    replace_layers(model, functools.partial(made_layer, layout=layout))
    if hasattr(model, "interactions"):
        call.mark(getattr(model, name) for name in LINEAR if hasattr(model, name))
        model.register_forward_pre_hook(call.begin, with_kwargs=True)
        model.register_forward_hook(call.end, always_call=True)
    if layout == "ir_mul" and hasattr(model, "products"):
        if forward_serves(model):
            model.forward = MaceForward(model, call)
            if all(hasattr(block, "handle_lammps") for _, block in blocks):
                mark_reads_sources(model)
        else:
            made = [item for product in model.products for item in product.linear.irreps_out]
            model.register_forward_hook(_Described(Irreps(made)))


class _Described:
    """A hook that gives the rows of nodes in a model's output as e3nn orders them.

    Args:
        irreps: of the rows.
    """

    def __init__(self, irreps: Irreps) -> None:
        self.irreps = irreps

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Change the output in place."""
        rows = output.get("node_feats") if isinstance(output, dict) else None
        if rows is not None:
            output["node_feats"] = rows_of_e3nn([rows], [self.irreps])


def _convert_interaction(block: Any, layout: str, call: Call) -> None:
    conv = block.conv_tp
    made: Any = holding(tensor_product(conv, _MaceConv, layout), conv)
    made.call = call
    weights: Any = getattr(block, "conv_tp_weights", None)
    if _ends_in_a_matrix(weights):
        block.conv_tp_weights = holding(network(weights, _Hidden), weights)
        made.networks = (block.conv_tp_weights,)  # in a tuple: it is the block's module
        if type(block).__name__ in DIVIDED and isinstance(block.avg_num_neighbors, float | int):
            block.forward = MaceInteraction(block)
    if hasattr(block, "handle_lammps") and "forward" not in vars(block):
        block.handle_lammps = _Features(block)
    block.conv_tp, block.conv_fusion = made, True
    skip: Any = getattr(block, "skip_tp", None)
    if is_of("e3nn", "FullyConnectedTensorProduct", skip):
        own: Any = holding(tensor_product(skip, _ByElement, layout), skip)
        own.call = call
        block.skip_tp = own


def _ends_in_a_matrix(network: Any) -> bool:
    """Whether it is a network of e3nn whose last layer has no function."""
    if not is_of("e3nn", "FullyConnectedNet", network):
        return False
    return getattr(list(network.children())[-1], "act", None) is None


class _Features:
    """`handle_lammps` of an interaction with MACE's own forward pass, which reads what it returns.

    Args:
        block: the interaction.
    """

    def __init__(self, block: Any) -> None:
        self._block = block

    def __call__(self, node_feats: Tensor, lammps_class: Any = None, **rows: Any) -> Tensor:
        """Features of all rows that edges read, of LAMMPS or elsewhere."""
        if lammps_class is None:
            return extended(node_feats)
        kind = type(self._block)
        found: Tensor = kind.handle_lammps(self._block, node_feats, lammps_class, **rows)
        return found


class _Hidden(FullyConnectedNet):
    """A radial network without its last matrix, which the convolution applies."""

    def forward(self, x: Tensor) -> Tensor:
        """(E, H) of x (E, num_basis)."""
        return self.hidden(x)


class _MaceConv(TensorProductConv):
    """Called as MACE calls a convolution that is fused."""

    call: Call
    networks: tuple[FullyConnectedNet, ...] = ()

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, edge_index: Tensor
    ) -> Tensor:
        """The sums over the edges of each node.

        Args:
            x: (N, D1), extended by the rows of others that edges read.
            y: (E, D2).
            weight: (E, W), or (E, H) of a network without its last matrix.
            edge_index: (2, E), src and dst.

        Returns:
            (N, D_out).
        """
        graph = self.call.graph(edge_index, given_rows(x), x.shape[0])
        if not self.networks:
            return super().forward(x, y, weight, graph)
        matrix = self.networks[0].last_matrix()
        if leaves_factors(weight):
            return super().forward(x, y, src=graph, radial=weight, radial_weight=matrix)
        return super().forward(x, y, weight @ matrix, graph)


class _ByElement(TensorProduct):
    """Irreps times the one-hot element of their node: a linear map for each element."""

    call: Call

    def forward(  # type: ignore[override]
        self, x: Tensor, attributes: Tensor
    ) -> Tensor:
        """(N, D_out) of x (N, D) and attributes (N, num_elements)."""
        element, by_element = self.call.elements(attributes), self._map
        if element is None or by_element is None or not by_element.serves(x):
            return super().forward(x, attributes)
        return by_element(x, self.weight, element, self.irreps_in2.dim)

    @functools.cached_property
    def _map(self) -> MapByElement | None:
        return MapByElement(self, self.layout) if by_elements(self) else None


def _mace_layer(module: Any, layout: str, call: Call) -> nn.Module | None:
    """torchweft's layer for one of MACE's own."""
    if is_of("mace", "SymmetricContraction", module):
        return _mace_contraction(module, layout, call)
    if is_of("mace", "ZBLBasis", module):
        return repulsion(module, call)
    if is_of("mace", "RadialEmbeddingBlock", module):
        return _radial_embedding(module)
    if (bessel := _bessel(module)) is not None:
        return holding(bessel, module)
    if is_of("mace", "PolynomialCutoff", module):
        return holding(PolynomialCutoff(float(module.r_max), int(module.p)), module)
    if layout == "ir_mul" and is_of("mace", "reshape_irreps", module):
        return holding(_Channels(module.irreps[0].mul), module)
    if layout == "ir_mul" and is_of("mace", "GatedEquivariantBlock", module):
        module._layout_is_ir_mul = True
    return None


class _RadialEmbedding(nn.Module):
    """MACE's RadialEmbeddingBlock of Bessel functions times a cutoff.

    Args:
        basis: the product.
    """

    def __init__(self, basis: RadialBasis) -> None:
        super().__init__()
        self.basis, self.out_dim = basis, basis.num_basis

    def forward(
        self, edge_lengths: Tensor, node_attrs: Tensor, edge_index: Tensor, atomic_numbers: Tensor
    ) -> tuple[Tensor, None]:
        """(E, num_basis) of lengths (E, 1), and no cutoff for the weights of edges."""
        return self.basis(edge_lengths), None


def _radial_embedding(module: Any) -> nn.Module | None:
    """The block as one function, where it is a product of known factors and lengths stay as is."""
    bessel, cutoff = _bessel(module.bessel_fn), module.cutoff_fn
    # before this argument, the block returned no pair
    pair = "apply_cutoff" in inspect.signature(type(module).__init__).parameters
    multiplies = pair and getattr(module, "apply_cutoff", True)
    if not multiplies or bessel is None or hasattr(module, "distance_transform"):
        return None
    basis = RadialBasis(float(cutoff.r_max), bessel.num_basis, int(cutoff.p))
    return holding(_RadialEmbedding(basis), module)


def _bessel(module: Any) -> BesselBasis | None:
    """MACE's Bessel functions, where the frequencies are no parameters that were trained."""
    if not is_of("mace", "BesselBasis", module) or isinstance(module.bessel_weights, nn.Parameter):
        return None
    return BesselBasis(float(module.r_max), module.bessel_weights.shape[0])


class _Channels(nn.Module):
    """(N, D · C) as (N, D, C).

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """A view of x."""
        return x.view(x.shape[0], x.shape[1] // self.channels, self.channels)


class _MaceContraction(SymmetricContraction):
    """Called as MACE's: x is (N, C, D) and z mul_ir, or x (N, D, C) and z ir_mul."""

    call: Call
    rows_are_mul_ir = True

    def forward(self, x: Tensor, attributes: Tensor) -> Tensor:
        """(N, C · D_out) of x and attributes (N, num_elements)."""
        element = self.call.elements(attributes)
        rows = (x.transpose(1, 2) if self.rows_are_mul_ir else x).flatten(1)
        z = super().forward(rows, attributes if element is None else element)
        return join(split(z, self.irreps_out, "ir_mul"), "mul_ir") if self.rows_are_mul_ir else z


def _mace_contraction(module: Any, layout: str, call: Call) -> nn.Module:
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
        check_parameters(own, part)
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
    made.call, made.rows_are_mul_ir = call, layout == "mul_ir"
    return holding(made, module)


def _coupling(part: Any, power: int, shape: tuple[int, ...]) -> Tensor:
    """U (2l+1, D, …, D, K) of a degree; MACE's lacks dimensions of size 1."""
    table: Tensor = getattr(part, f"U_matrix_{power}")
    return table.reshape(*shape, table.shape[-1])
