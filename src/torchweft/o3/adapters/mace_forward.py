"""The forward pass of converted MACE and ScaleShiftMACE models, in few operations.

    v[e] = (x[dst[e]] − x[src[e]] + shift[e]) (1 + strain),   E = Σ_n E0[n] + interaction,
    F = −∂E/∂x,   virials = −∂E/∂strain,   stress = −virials / volume

Results are those of MACE's own forward pass, to rounding.  Its indices are replaced: vectors and
forces go by the tables of the graph that the convolutions have, one head needs no index, the sum
over a single structure is a plain one, and the sign of the forces enters with the cotangent.

Source: mace.modules.models of mace-torch 0.3.16, and Batatia et al., arXiv:2206.07697.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling
from torchweft.core.private import is_hooked
from torchweft.errors import BackendError
from torchweft.o3.adapters.model_call import Call
from torchweft.o3.adapters.sources import Current, extended, extending
from torchweft.o3.edge_vectors.operator import edge_lengths, edge_vectors, rows_of_totals
from torchweft.o3.energies.functions import graph_energies, sums_of_graphs
from torchweft.o3.graph import Tables
from torchweft.o3.irreps.irreps import Irreps, join, split
from torchweft.o3.layers.harmonics_and_radial import (
    RadialBasis,
    SphericalHarmonics,
    harmonics_and_radial,
)

__all__ = ["DIVIDED", "MaceForward", "MaceInteraction", "forward_serves", "rows_of_e3nn"]

Given = dict[str, Tensor]
Results = dict[str, Tensor | None]

MODELS = ("MACE", "ScaleShiftMACE")
"""Classes, by name: a class that is derived from them keeps its own forward pass."""

RESIDUAL = "RealAgnosticResidualInteractionBlock"

DIVIDED = ("RealAgnosticInteractionBlock", RESIDUAL)
"""Classes of interactions, by name."""

LARGEST_STRESS = 1e10
"""Where MACE takes the cell for none, and gives 0."""


def forward_serves(model: Any) -> bool:
    """Whether MaceForward knows all parts of a converted model."""
    known = type(model).__name__ in MODELS and type(model).__module__.startswith("mace.")
    readouts = all(type(part).__module__.startswith("mace.") for part in model.readouts)
    return known and readouts and not hasattr(model, "joint_embedding")


class MaceForward:
    """`model.forward` of a converted model; an attribute, so that copies and pickles have it too.

    Calls for Hessians, forces or stresses of edges and atoms, those by LAMMPS, those with a
    displacement in their data, and those with numbers of several dtypes go to the forward pass of
    the model's class.  Other than that, this one leaves `data` as it is.

    Args:
        model: with layers of torchweft, whose rows are ir_mul.
        call: of its layers.
    """

    def __init__(self, model: Any, call: Call) -> None:
        self._model = model
        self._call = call
        self._irreps = [Irreps(product.linear.irreps_out) for product in model.products]
        energies = model.atomic_energies_fn.atomic_energies
        self._num_heads = 1 if energies.dim() < 2 else energies.shape[0]

    def __call__(
        self,
        data: Given,
        training: bool = False,
        compute_force: bool = True,
        compute_virials: bool = False,
        compute_stress: bool = False,
        compute_displacement: bool = False,
        compute_hessian: bool = False,
        compute_edge_forces: bool = False,
        compute_atomic_stresses: bool = False,
        lammps_mliap: bool = False,
    ) -> Results:
        """What MACE's own forward pass takes and returns."""
        rare = {
            "compute_hessian": compute_hessian,
            "compute_edge_forces": compute_edge_forces,
            "compute_atomic_stresses": compute_atomic_stresses,
            "lammps_mliap": lammps_mliap,
        }
        wanted = _Wanted(compute_force, compute_virials, compute_stress, compute_displacement)
        if any(rare.values()) or not _is_usual(data, wanted):
            _check_rows_are_all(rare, data)
            found: Results = type(self._model).forward(self._model, data, training, *wanted, **rare)
            rows = found["node_feats"]
            assert rows is not None
            every = Irreps([item for irreps in self._irreps for item in irreps])
            return found | {"node_feats": rows_of_e3nn([rows], [every])}
        self._call.read(data["edge_index"], data["node_attrs"])
        tables = _graph_tables(data)
        edges = _edges(data, self._call, wanted)
        layers, readouts, pair = self._layers(data, edges)
        found, energy = self._energies(data, tables, readouts, pair)
        return {
            **found,
            **_slopes(energy, data, edges.displacement, wanted, training),
            "displacement": edges.displacement,
            "node_feats": rows_of_e3nn(layers, self._irreps),
        }

    def _layers(
        self, data: Given, edges: _Edges
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Features of each layer, readouts (N, heads), and energies (N,) of pair repulsion."""
        model, attributes, edge_index = self._model, data["node_attrs"], data["edge_index"]
        harmonics, radial, cutoff, pair = self._functions_of_edges(data, edges.vectors)
        features, layers = model.node_embedding(attributes), []
        for i, (interaction, product) in enumerate(
            zip(model.interactions, model.products, strict=True)
        ):
            message, skipped = interaction(
                node_attrs=attributes,
                node_feats=features,
                edge_attrs=harmonics,
                edge_feats=radial,
                edge_index=edge_index,
                cutoff=cutoff,
                first_layer=i == 0,
            )
            features = product(node_feats=message, sc=skipped, node_attrs=attributes)
            layers.append(features)
        read = layers[-1:] if len(model.readouts) == 1 else layers
        heads = self._heads(data)
        readouts = [of(rows, heads) for of, rows in zip(model.readouts, read, strict=False)]
        return layers, readouts, pair

    def _functions_of_edges(
        self, data: Given, vectors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Harmonics, radial functions, cutoff, and energies (N,) of pair repulsion."""
        model, attributes, edge_index = self._model, data["node_attrs"], data["edge_index"]
        spherical, embedding = model.spherical_harmonics, model.radial_embedding
        repels, basis = hasattr(model, "pair_repulsion"), getattr(embedding, "basis", None)
        hooked = any(map(is_hooked, (spherical, embedding, *embedding.children())))
        own = not (repels or hooked) and type(spherical) is SphericalHarmonics
        if own and type(basis) is RadialBasis:
            return *harmonics_and_radial(spherical, basis, vectors), None, None
        of_elements = repels or hasattr(embedding, "distance_transform")
        every = extended(attributes) if of_elements else attributes
        of_lengths = edge_lengths(vectors), every, edge_index, model.atomic_numbers
        pair = model.pair_repulsion_fn(*of_lengths)[: attributes.shape[0]] if repels else None
        return spherical(vectors), *embedding(*of_lengths), pair

    def _heads(self, data: Given) -> Tensor | None:
        """(N,): the head of each node; None where there is one."""
        if self._num_heads == 1:
            return None
        batch = data["batch"]
        return data["head"].index_select(0, batch) if "head" in data else torch.zeros_like(batch)

    def _energies(
        self, data: Given, tables: Tables | None, readouts: list[Tensor], pair: Tensor | None
    ) -> tuple[Results, Tensor]:
        """Energies as the model returns them, and the one (graphs,) that has forces."""
        model, heads = self._model, self._heads(data)
        alone = _of_head(model.atomic_energies_fn(data["node_attrs"]), heads)
        if type(model).__name__ == "MACE":
            every = [_of_head(readout, heads) for readout in readouts]
            pair = torch.zeros_like(alone) if pair is None else pair
            rows = torch.stack([alone, pair, *every], -1)
            contributions = sums_of_graphs(rows, tables)
            energy = contributions.sum(-1)
            found: Results = {
                "energy": energy,
                "node_energy": rows.sum(-1),
                "contributions": contributions,
            }
            return found, energy
        parts = [_of_head(readout, heads) for readout in readouts]
        parts += [] if pair is None else [pair]
        interaction, energy, node_energy = graph_energies(
            parts, alone, *_scales(model.scale_shift, heads), tables
        )
        return {
            "energy": energy,
            "node_energy": node_energy,
            "interaction_energy": interaction,
        }, interaction


class MaceInteraction:
    """`forward` of a converted interaction that divides messages by the mean number of neighbours.

    The last matrix of its radial network is divided instead, a number of the host.  Where the mean
    has another value since, messages are multiplied by the quotient.

    Args:
        block: of a class of DIVIDED, with its converted `conv_tp_weights`.
    """

    def __init__(self, block: Any) -> None:
        self._block, self._divisor = block, block.avg_num_neighbors
        last = list(block.conv_tp_weights.children())[-1]
        last.before /= self._divisor

    def __call__(
        self,
        node_attrs: Tensor,
        node_feats: Tensor,
        edge_attrs: Tensor,
        edge_feats: Tensor,
        edge_index: Tensor,
        cutoff: Tensor | None = None,
        lammps_class: Any = None,
        lammps_natoms: tuple[int, int] = (0, 0),
        first_layer: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """What MACE's own forward pass takes and returns."""
        block, given = self._block, (edge_attrs, edge_feats, edge_index, cutoff)
        if lammps_class is not None:
            message, skipped = type(block).forward(
                block, node_attrs, node_feats, *given, lammps_class=lammps_class,
                lammps_natoms=lammps_natoms, first_layer=first_layer,
            )  # fmt: skip
            return message * self._divisor, skipped
        features = extending(block.linear_up(node_feats))
        residual = type(block).__name__ == RESIDUAL
        skipped = block.skip_tp(node_feats, node_attrs) if residual else None
        weights = block.conv_tp_weights(edge_feats)
        weights = weights if cutoff is None else weights * cutoff
        message = block.conv_tp(features(), edge_attrs, weights, edge_index)
        message = block.linear(message)
        if block.avg_num_neighbors != self._divisor:
            message = message * (self._divisor / block.avg_num_neighbors)
        message = message if residual else block.skip_tp(message, node_attrs)
        return block.reshape(message), skipped


class _Wanted(NamedTuple):
    """What a call is to compute, in the order of MACE's arguments."""

    force: bool
    virials: bool
    stress: bool
    displacement: bool

    @property
    def strain(self) -> bool:
        """Whether a strain is differentiated by."""
        return self.virials or self.stress


class _Edges(NamedTuple):
    vectors: Tensor  # (E, 3)
    displacement: Tensor  # (graphs, 3, 3)


def _is_usual(data: Given, wanted: _Wanted) -> bool:
    """Whether a call has no displacement of its own, and numbers of one dtype."""
    read = ("unit_shifts", "cell") if wanted.strain or wanted.displacement else ("shifts",)
    dtypes = {data[name].dtype for name in ("positions", "node_attrs", *read)}
    return data.get("displacement") is None and len(dtypes) == 1


def _check_rows_are_all(rare: dict[str, bool], data: Given) -> None:
    if Current.sources is None:
        return
    wanted = [name for name, value in rare.items() if value]
    wanted += ["a displacement in its data"] if data.get("displacement") is not None else []
    raise BackendError(
        f"this call of MACE has {', '.join(wanted) or 'numbers of several dtypes'}, and rows of "
        "other ranks: only energies, forces, virials and stress are computed over ranks. Leave it "
        "out, or call the model with all rows on one rank."
    )


def _edges(data: Given, call: Call, wanted: _Wanted) -> _Edges:
    """Vectors of edges, strained by a displacement of zeros where one is wanted."""
    positions, edge_index = data["positions"], data["edge_index"]
    if not compiling():
        positions.requires_grad_(True)
    every = extended(positions)
    graph = call.graph(edge_index, every.shape[0], every.shape[0])
    displacement = positions.new_zeros(_num_graphs(data), 3, 3)
    if not (wanted.strain or wanted.displacement):
        vectors = edge_vectors(every, graph, data["shifts"])
        return _Edges(vectors, displacement)
    if compiling():  # a graph has no leaves of its own
        displacement = displacement + positions.sum() * 0.0
    else:
        displacement.requires_grad_(True)
    graphs = data["batch"].index_select(0, edge_index[1])
    shifts = _by_graph(data["unit_shifts"], data["cell"].view(-1, 3, 3), graphs)
    plain = edge_vectors(every, graph, shifts)
    vectors = plain + _by_graph(plain, 0.5 * (displacement + displacement.mT), graphs)
    return _Edges(vectors, displacement)


def _by_graph(rows: Tensor, matrices: Tensor, graphs: Tensor) -> Tensor:
    """(E, 3): each row times the matrix of its graph."""
    if matrices.shape[0] == 1:
        return rows @ matrices[0]
    return torch.bmm(rows.unsqueeze(1), matrices.index_select(0, graphs)).squeeze(1)


def _num_graphs(data: Given) -> int:
    return data["ptr"].numel() - 1


def _graph_tables(data: Given) -> Tables | None:
    """The nodes of each graph; None of one."""
    graphs = _num_graphs(data)
    return None if graphs == 1 else rows_of_totals(data["batch"], graphs)


def _of_head(x: Tensor, heads: Tensor | None) -> Tensor:
    """(N,): the column of x (N, heads) for each node's head."""
    return x.squeeze(1) if heads is None else x.gather(1, heads.unsqueeze(1)).squeeze(1)


def _scales(block: Any, heads: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scale and the shift of all nodes, (1,) each, or of each node's head, (N,)."""
    both = block.scale.view(-1), block.shift.view(-1)
    return both if heads is None else (both[0][heads], both[1][heads])


def _slopes(
    energy: Tensor, data: Given, displacement: Tensor, wanted: _Wanted, training: bool
) -> Results:
    """Forces, virials and stress, and the results that only MACE's own forward pass gives."""
    names = ("forces", "edge_forces", "virials", "stress", "atomic_virials", "atomic_stresses")
    found: Results = dict.fromkeys((*names, "hessian"))
    inputs = [data["positions"]] if wanted.force or wanted.strain else []
    inputs += [displacement] if wanted.strain else []
    if not inputs:
        return found
    gradients = torch.autograd.grad(
        [energy], inputs, [torch.full_like(energy, -1)],
        retain_graph=training, create_graph=training, allow_unused=True,
    )  # fmt: skip
    slopes = [
        torch.zeros_like(of) if g is None else g for g, of in zip(gradients, inputs, strict=True)
    ]
    found["forces"] = slopes[0]
    if wanted.strain:
        found["virials"] = slopes[1]
        found["stress"] = (
            _stress(slopes[1], data["cell"]) if wanted.stress else torch.zeros_like(displacement)
        )
    return found


def _stress(virials: Tensor, cell: Tensor) -> Tensor:
    """−virials / volume; 0 where there is no cell."""
    a, b, c = cell.view(-1, 3, 3).unbind(1)
    volume = (a * torch.linalg.cross(b, c)).sum(-1).abs()
    stress = virials / -volume[:, None, None]
    return torch.where(stress.abs() < LARGEST_STRESS, stress, 0.0)


def rows_of_e3nn(layers: list[Tensor], irreps: list[Irreps]) -> Tensor:
    """(N, D): rows (N, ·) of layers, each ir_mul, one after the other as e3nn orders them."""
    blocks = [
        block for x, of in zip(layers, irreps, strict=True) for block in split(x, of, "ir_mul")
    ]
    return join(blocks, "mul_ir")
