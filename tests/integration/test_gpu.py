"""What only a GPU shows: graph replay on changed inputs, no synchronisation, large offsets."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.cases import products, suites
from torchweft import constant
from torchweft.capturing.graphs import waiting_raises
from torchweft.products import indexed_mul
from torchweft.testing.contract import assert_same_bits, evaluate, pose
from torchweft.testing.doors import check_cuda_graph

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

SUITES = suites()
DOORS = [case for family in ("products", "o3", "reductions") for case in SUITES[family].doors]


FIRST_PRODUCT = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
"""torch's own warning, where a product of matrices is the first call of autograd's thread."""


@FIRST_PRODUCT
@pytest.mark.parametrize("case", DOORS, ids=lambda case: case.name)
def test_graph_replay(case):
    check_cuda_graph(case)


@FIRST_PRODUCT
@pytest.mark.parametrize("case", DOORS, ids=lambda case: case.name)
def test_no_synchronisation_once_a_plan_exists(case):
    """Of values and gradients, with constants: the host waits where other tables are compared."""
    problem = pose(case, device="cuda", dtype=torch.float32)
    tables = tree_map_only(torch.Tensor, constant, problem.tables)
    problem = problem._replace(tables=tables)
    evaluate(case.call, problem, order=1)
    with waiting_raises():
        evaluate(case.call, problem, order=1)


def test_a_thread_that_has_called_nothing_of_cuda():
    """As autograd's: memory that torch kept needs no call, so the launch is its first."""
    x, y = (torch.randn(2, 1000, 64, device="cuda") for _ in range(2))
    index = torch.arange(999, -1, -1, device="cuda")
    here = [indexed_mul(x, y, index) for _ in range(2)]
    kept = here.pop()
    del kept
    with ThreadPoolExecutor(1) as threads:
        there = threads.submit(indexed_mul, x, y, index).result()
    assert_same_bits(there, here[0], "another thread")


@pytest.mark.parametrize("check", products.suite().large)
def test_offsets_past_2_to_the_31(check):
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    check("cuda")
