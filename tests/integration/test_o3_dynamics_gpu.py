"""Neighbour lists and calculators on a GPU: lists and numbers of the CPU, and steps as graphs."""

import copy
import warnings

import numpy as np
import pytest
import torch
from ase.build import bulk

from tests.neighbours import rows
from torchweft import o3
from torchweft.capturing.graphs import CudaGraphs
from torchweft.testing import assert_within_bound

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array")  # by ASE

TRICLINIC = torch.tensor([[5.0, 0.0, 0.0], [1.5, 4.5, 0.0], [-1.0, 0.5, 4.0]], dtype=torch.float64)


@pytest.mark.parametrize("pbc", [(False,) * 3, (True, False, True), (True,) * 3])
@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("count", [0, 1, 40, 6000])
def test_lists_are_those_of_the_cpu(count, scale, pbc):
    spread = 3 * max(1.0, count / 40) ** (1 / 3)
    positions, cell = torch.randn(count, 3, dtype=torch.float64) * spread, TRICLINIC * scale
    if count == 6000:
        cell = cell * spread
    batch = torch.arange(count) // 50
    cells = cell.expand(max(1, -(-count // 50)), 3, 3).contiguous()
    expected = o3.neighbour_list(positions, 2.0, cells, pbc, batch)
    found = o3.neighbour_list(positions.cuda(), 2.0, cells.cuda(), pbc, batch.cuda())
    assert all(t.is_cuda for t in found)
    assert rows([t.cpu() for t in found]) == rows(expected)


def test_a_step_within_the_skin_reads_two_numbers():
    """Whether an atom has moved too far, and the number of edges."""
    positions, cell = torch.randn(100, 3, device="cuda") * 4, 3 * TRICLINIC.float().cuda()
    near = o3.NeighbourList(2.0)
    near(positions, cell, True)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        near(positions + 0.01, cell, True)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert near.builds == 1
    assert len(copies) <= 2


RC = 4.0


class Potential(torch.nn.Module):
    """Two layers of messages whose weights are zero beyond the cutoff."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(80, 8)
        paths = [(0, degree, degree, "uvu", True) for degree in range(2)]
        self.first = o3.TensorProductConv("8x0e", "0e+1o", "8x0e+8x1o", paths)
        back = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True)]
        self.second = o3.TensorProductConv("8x0e+8x1o", "0e+1o", "8x0e", back)
        widths = self.first.weight_numel, self.second.weight_numel
        self.radial = torch.nn.ModuleList(torch.nn.Linear(3, width) for width in widths)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, numbers, vectors, graph):
        length = vectors.norm(dim=1, keepdim=True)
        y = torch.cat([torch.ones_like(length), vectors / length], 1)
        cutoff = torch.where(length < RC, (1 - length / RC) ** 3, 0)
        waves = torch.cat([(n * length).sin() for n in range(1, 4)], 1)
        x = self.embedding(numbers)
        for conv, network in zip((self.first, self.second), self.radial, strict=True):
            x = conv(x, y, cutoff * network(waves), graph)
        return self.out(x.tanh()).sum()


class Counted:
    """Records and replays of CUDA graphs from now on."""

    def __init__(self, patch):
        self.records, self.replays = 0, 0
        record, replay = CudaGraphs.record, torch.cuda.CUDAGraph.replay

        def recorded(recorder, run):
            self.records += 1
            return record(recorder, run)

        def replayed(graph):
            self.replays += 1
            return replay(graph)

        patch.setattr(CudaGraphs, "record", recorded)
        patch.setattr(torch.cuda.CUDAGraph, "replay", replayed)


def solid(seed=0, scale=1.0):
    atoms = bulk("Cu", cubic=True) * (2, 2, 2)
    atoms.symbols[::2] = "O"
    atoms.set_cell(atoms.cell.array * scale, scale_atoms=True)
    atoms.rattle(0.1, seed=seed)
    return atoms


def values(atoms, calculator):
    atoms = atoms.copy()
    atoms.calc = calculator
    found = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    return [torch.tensor(np.asarray(value)) for value in found]


def check(atoms, calculator, model):
    """Results are as near to float64's on the CPU as twice the rounding of a launched call."""
    dtype = next(model.parameters()).dtype
    exact = values(atoms, o3.calculator(copy.deepcopy(model), cutoff=RC, dtype=torch.float64,
                                        device="cpu"))  # fmt: skip
    plain = values(atoms, o3.calculator(copy.deepcopy(model), cutoff=RC, device="cpu"))
    for a, b, c in zip(values(atoms, calculator), exact, plain, strict=True):
        rounding = len(atoms) * torch.finfo(dtype).eps * b.abs().max()
        assert (a - b).abs().max() <= 2 * torch.maximum((c - b).abs().max(), rounding)


def test_a_calculator_replays_a_graph(monkeypatch):
    """Weights that change are read by the record; a model that is turned is recorded anew."""
    counted, model = Counted(monkeypatch), Potential()
    calculator = o3.calculator(model, cutoff=RC, device="cuda")
    for seed in range(6):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        check(solid(seed), calculator, model)
    assert (counted.records, counted.replays) == (1, 4)
    for change in (model.double, model.cpu, model.cuda):
        change()
        for seed in range(4):
            check(solid(seed), calculator, model)
    assert (counted.records, counted.replays) == (3, 8)


def test_more_edges_than_a_graph_has_room_for(monkeypatch):
    counted, model = Counted(monkeypatch), Potential()
    calculator = o3.calculator(model, cutoff=RC, device="cuda")
    for scale in (1.0, 0.8):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for seed in range(4):
                check(solid(seed, scale), calculator, model)
        told = [w for w in said if "its record has room for" in str(w.message)]
        assert len(told) == (scale < 1)
    assert counted.records == 2


def test_a_potential_that_waits_for_the_gpu_runs_launch_by_launch(monkeypatch):
    counted = Counted(monkeypatch)

    def waits(numbers, vectors, graph):
        assert float(vectors.detach().norm(dim=1).max()) < RC
        return vectors.square().sum()

    calculator = o3.calculator(waits, cutoff=RC, dtype=torch.float64, device="cuda")
    values(solid(0), calculator)
    message = r"runs without a CUDA graph, launch by launch: .*assert float\(vectors"
    with pytest.warns(UserWarning, match=message):
        found = values(solid(1), calculator)
    exact = values(solid(1), o3.calculator(waits, cutoff=RC, dtype=torch.float64, device="cpu"))
    for a, b in zip(found, exact, strict=True):
        assert_within_bound(a, b, torch.full_like(b, float(exact[0])), 32 * 32)
    assert counted.records == 0
