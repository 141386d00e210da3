"""Neighbour lists on a GPU: those of the CPU, and one number read a step."""

import pytest
import torch

from tests.neighbours import rows
from torchweft import o3

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        near(positions + 0.01, cell, True)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert near.builds == 1
    assert len(copies) <= 2
