"""A potential of our own layers over ranks: energy, forces, stress and training.

Models of MACE and NequIP are in tests/clients.
"""

import functools

import pytest
import torch

from tests.nearness import beside, check_named, model_beside
from tests.neighbours import brute_force
from tests.ranks import in_one_thread, run
from torchweft import o3
from torchweft.core.default_dtype import default_dtype
from torchweft.distributed import Halo, potential, shard, total
from torchweft.errors import BackendError
from torchweft.o3.adapters.sources import Current, extended, extending, given_rows, reading

CUTOFF = 3.0
HIDDEN = "4x0e+4x1o"
SIZES = [2, 3, 4]


class Potential(torch.nn.Module):
    """Two layers of convolution and contraction; each reads rows of others by `read`."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(2, 4))
        self.basis = o3.RadialBasis(CUTOFF, 4)
        self.harmonics = o3.SphericalHarmonics("1x0e+1x1o", normalize=True)
        modes = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)]
        more = [*modes, (1, 0, 1, "uvu", True), (1, 1, 0, "uvu", True)]
        self.convs = torch.nn.ModuleList(
            o3.TensorProductConv(x, "1x0e+1x1o", HIDDEN, chosen, shared_weights=False)
            for x, chosen in (("4x0e", modes), (HIDDEN, more))
        )
        self.networks = torch.nn.ModuleList(
            o3.FullyConnectedNet([4, 8, conv.weight_numel], torch.nn.functional.silu)
            for conv in self.convs
        )
        self.contractions = torch.nn.ModuleList(
            o3.SymmetricContraction(HIDDEN, HIDDEN, 2, 2) for _ in self.convs
        )
        self.readout = o3.Linear(HIDDEN, "1x0e")

    def forward(self, positions, elements, shifts, src, dst, read):
        """Energies (n,) of own atoms."""
        every = read(positions)
        vectors = every[dst] - every[src] + shifts
        harmonics = self.harmonics(vectors)
        radial = self.basis(torch.linalg.vector_norm(vectors, dim=1, keepdim=True))
        x = self.embedding[elements]
        for conv, network, contraction in zip(
            self.convs, self.networks, self.contractions, strict=True
        ):
            graph = o3.Graph(src, dst, len(positions), len(every))
            x = contraction(conv(read(x), harmonics, network(radial), graph), elements)
        return self.readout(x)[:, 0]


def model():
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        return Potential()


@functools.cache
def crystal():
    """A rattled periodic crystal of two elements: positions, cell, src, dst, periodic images."""
    generator = torch.Generator().manual_seed(0)
    places = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2)).double()
    positions = 2 * places + 0.2 * torch.rand(12, 3, generator=generator, dtype=torch.float64)
    cell = torch.diag(torch.tensor([6.0, 4.0, 4.0], dtype=torch.float64))
    edges = torch.tensor(brute_force(positions, CUTOFF, cell, [True] * 3))
    return positions, cell, edges[:, 1], edges[:, 0], edges[:, 2:]


@in_one_thread
def trained(part, read, add, seed=None):
    """Energy, own forces, stress, and this rank's part of the gradients of a loss of all three.

    With a seed in float32, of numbers beside the given ones.
    """
    net, (positions, cell, _, _, images) = model(), crystal()
    if seed is not None:
        net, (positions, cell) = model_beside(net, seed), beside([positions, cell], seed)
    dtype = positions.dtype
    x = positions[part.global_ids].requires_grad_()
    strain = torch.zeros(3, 3, dtype=dtype, requires_grad=True)
    deform = torch.eye(3, dtype=dtype) + (strain + strain.T) / 2
    shifts = images[part.edges].to(dtype) @ cell @ deform
    given = x @ deform, part.global_ids % 2, shifts, part.src, part.dst, read
    energy = add(net(*given).sum())
    slope, virial = torch.autograd.grad(energy, (x, strain), create_graph=True)
    stress = add(virial) / torch.linalg.det(cell)
    loss = energy.sin() + add((slope - 0.1).square().sum()) + stress.square().sum()
    grads = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    named = zip(net.named_parameters(), grads, strict=True)
    found = {"energy": energy, "forces": -slope, "stress": stress}
    return {k: t.detach() for k, t in found.items()}, {n: g for (n, _), g in named if g is not None}


def part_of(rank, size, empty=False):
    positions, _, src, dst, _ = crystal()
    if empty:  # the last rank has no atoms, the others every second one
        owner = torch.arange(len(positions)) % (size - 1)
        return shard(src, dst, len(positions), rank, size, owner=owner)
    return shard(src, dst, len(positions), rank, size, positions)


def over_ranks(rank, size, group):
    found = []
    for empty in (False, True):
        part = part_of(rank, size, empty)
        halo = part.halo(group)
        add = functools.partial(total, group=group)
        rows, grads = trained(part, halo, add)
        again, _ = trained(part, halo, add)
        assert all(again[key].equal(rows[key]) for key in rows)
        found.append((part.global_ids, rows, {name: add(grad) for name, grad in grads.items()}))
    return found


@functools.cache
def one_process(seed=None):
    rows, grads = trained(part_of(0, 1), lambda x: x, lambda x: x, seed)
    return rows | grads


@pytest.mark.parametrize("size", SIZES)
def test_a_potential_is_trained_as_in_one_process(size):
    for ranks in zip(*run(over_ranks, size), strict=True):
        ids, rows, grads = zip(*ranks, strict=True)
        whole = rows[0] | grads[0]
        whole["forces"] = torch.cat([part["forces"] for part in rows])[torch.cat(ids).argsort()]
        for key in ("energy", "stress"):
            assert all(part[key].equal(rows[0][key]) for part in rows)
        check_named(whole, one_process(), one_process)


def test_a_model_that_was_not_converted_is_told():
    with pytest.raises(BackendError, match=r"given a Potential: only energies.*call halo\(x\)"):
        potential(model(), {}, Halo(torch.arange(2), torch.arange(0)))


def test_rows_are_extended_while_a_halo_is_read():
    x = torch.arange(2.0)[:, None]
    assert extended(x) is x
    assert given_rows(x) == 2
    with reading(2, lambda rows: torch.cat([rows, 7 * rows])):
        assert extended(x)[:, 0].tolist() == [0, 1, 0, 7]
        assert given_rows(extended(x)) == 2
        with pytest.raises(ZeroDivisionError), reading(3, lambda rows: rows / (1 // 0)):
            extended(x)
        assert given_rows(extended(x)) == 2
    assert Current.sources is None


class Doubled:
    """Extends rows by themselves; `begin` tells that it was called."""

    def __init__(self):
        self.begun = 0

    def __call__(self, x):
        return self.finish(self.begin(x))

    def begin(self, x):
        self.begun += 1
        return x

    def finish(self, begun):
        self.begun -= 1
        return torch.cat([begun, begun])


def test_rows_are_under_way_between_two_halves():
    x, doubled = torch.arange(2.0)[:, None], Doubled()
    assert extending(x)() is x
    with reading(2, doubled):
        arrive = extending(x)
        assert doubled.begun == 1
        assert arrive().equal(extended(x))
        assert doubled.begun == 0
