"""What only a GPU shows: graph replay on changed inputs, no synchronisation, large offsets."""

import pytest
import torch

from weft.testing.cases import products
from weft.testing.contract import pose
from weft.testing.doors import check_cuda_graph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("case", products.door_cases(), ids=lambda case: case.name)
def test_graph_replay(case):
    check_cuda_graph(case)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("case", products.door_cases(), ids=lambda case: case.name)
def test_no_synchronisation_once_a_plan_exists(case):
    problem = pose(case, device="cuda", dtype=torch.float32)
    case.call(*problem.inputs, **problem.tables)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.call(*problem.inputs, **problem.tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("check", products.suite().large)
def test_offsets_past_2_to_the_31(check):
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    check("cuda")
