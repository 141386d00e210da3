"""The CPU bodies where the contract's small cases do not reach: threads, blocks, matrices, room.

Seen red with: parts of n that overlap.
"""

import math

import pytest
import torch

import torchweft
from tests.cases.products import MODES, OPS, make_case, skewed_case
from tests.conftest import INTERPRETED
from torchweft import products
from torchweft.products.numba_path import GEMM, SERIAL
from torchweft.testing.contract import Setting, assert_same_bits, check_values

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)

BACKENDS = ("numba", "torch")


def large(op, shared="nn", channels=(16, 8), **options):
    """A call with more work than one thread takes, over tables with repeats and empty rows."""
    tables = MODES["everything"](torch.Generator().manual_seed(0)) | options
    batch = math.ceil(SERIAL / (tables["gather_index"].numel() * channels[0])) + 1
    return make_case(op, "large", tables, shared=shared, channels=channels, batch=batch)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_numba_gives_the_same_bits_on_any_number_of_threads(op, accumulated, threads):
    case = large(op, out_accumulated=accumulated)
    setting = Setting(backend="numba", order=0)
    problem = setting.pose(case)
    found = []
    for number in (1, 2):
        threads(number)
        found.append(setting.run(case, problem)["value"])
    assert_same_bits(found[1], found[0], f"{case.name}, two threads against one")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["mul", "inner", "outer"])
def test_large_sums(op, backend, threads):
    threads(1)
    check_values(large(op, "ns", out_accumulated=True), Setting(backend=backend, order=1))
    check_values(skewed_case(op, 30_000), Setting(backend=backend, order=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["vecmat", "mat_t_vec", "outer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_shared_over_n(op, dtype, backend):
    least_batch, least_size = GEMM
    side = math.isqrt(least_size) + 1
    shared = {"vecmat": "ns", "mat_t_vec": "sn", "outer": "nn"}[op]
    tables = MODES["everything"](torch.Generator().manual_seed(1)) | {
        "out_accumulated": op == "outer"
    }
    case = make_case(op, "gemm", tables, shared=shared, channels=(side, side), batch=least_batch)
    check_values(case, Setting(dtype=dtype, backend=backend, order=1))


def test_explain_tells_of_copies():
    x, y = torch.randn(3, 9, 8), torch.randn(9, 8)

    def room(x, **options):
        told = torchweft.explain(
            products.indexed_mul_scale_gather, x, y, backend="numba", **options
        )
        return sum(launch.workspace_bytes for launch in told.launches)

    assert room(x) == 0
    assert room(x[:1].expand(3, 9, 8)) == 0
    assert room(x.mT.contiguous().mT) == x.nbytes
    assert room(x, out_accumulated=True) == x.nbytes  # a part for each n


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_meet_a_matrix_at_a_time(backend):
    x, w = torch.randn(256, 9, 64), torch.randn(3, 64, 64)
    index2 = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 2])
    told = torchweft.explain(
        products.indexed_vecmat_scale_gather, x, w, index2=index2, backend=backend
    )
    (launch,) = told.launches
    assert (launch.backend, launch.tile) == ("torch", {"entries": 9, "batch": 256})
