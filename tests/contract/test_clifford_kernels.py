"""Generated kernels against the oracle, in each form that the template has.

Rows several at a time, rows longer than a tile (programs split at their sums, or shared out), any
strides, no rows, results summed over rows.  Seen red with: the mask of features or of rows left
off, a partial sum that was not stored, sums of a long row that kept one tile alone.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.nearness import beside
from torchweft.clifford import Algebra, reference
from torchweft.clifford.programs import programs
from torchweft.core.expressions.expr import reachable, total
from torchweft.core.expressions.program import Operand, Output, Program
from torchweft.core.expressions.rewrite import split
from torchweft.testing.bounds import assert_as_accurate, plain_error

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from torchweft.clifford.programs import launch

pytestmark = pytest.mark.kernels

EPS = 1e-6
PLANE, SPACE = Algebra((1, 1)), Algebra((1, 1, 1))
NULL = Algebra((0, 1))


def chain(algebra, norm):
    def oracle(x, y, w):
        o = reference.product(reference.gate(x), reference.gate(y), algebra, w.T)
        return reference.rms_norm(o, algebra, norm, EPS)

    return programs.key("chain", algebra, norm, EPS.hex()), oracle


def product(algebra, kind="geometric", weighted=()):
    def oracle(x, y, w=None):
        return reference.product(x, y, algebra, None if w is None else w.T, kind)

    return programs.key("product", algebra, kind, *weighted), oracle


def operands(program, rows, features, dtype, strided):
    """Random inputs: contiguous, or blades last in rows that are wider than they."""
    generator = torch.Generator().manual_seed(rows + features)
    found = []
    for operand in program.inputs:
        lengths = [{"row": rows, "feature": features}[axis] for axis in operand.axes]
        shape = (*lengths, operand.size + 1) if strided else (operand.size, *lengths)
        drawn = torch.randn(shape, generator=generator).to(dtype)
        found.append(drawn.movedim(-1, 0)[: operand.size] if strided else drawn)
    return found


def derivatives(oracle, inputs, order):
    """The oracle's value, or its gradients, or gradients of these: by all that they depend on."""
    leaves = [a.detach().requires_grad_() for a in inputs]
    given = leaves[: len(leaves) - (order > 0) - 3 * (order > 1)]
    results = [oracle(*given)]
    cotangents = leaves[len(given) :]
    for _ in range(order):
        pulled, cotangents = cotangents[: len(results)], cotangents[len(results) :]
        results = torch.autograd.grad(results, given, pulled, create_graph=True)
        given = [*given, *pulled]
    return [r.detach() for r in results]


def check(key, oracle, rows, features, dtype=torch.float32, strided=False, order=0):
    found = programs.program(key)
    for _ in range(order):
        key = f"{key} | vjp {'1' * len(found.inputs)} {'1' * len(found.outputs)}"
        found = programs.program(key)
    inputs = operands(found, rows, features, dtype, strided)
    results = launch.run(found, inputs)
    exact = derivatives(oracle, [a.double() for a in inputs], order)
    plain = [derivatives(oracle, beside(inputs, seed), order) for seed in range(16)]
    for a, b, *samples in zip(results, exact, *plain, strict=True):
        assert a.is_contiguous()
        assert a.dtype == dtype
        noise = [plain_error(c, b, dtype) for c in samples]
        assert_as_accurate(a, b, torch.stack(noise))


@pytest.fixture
def short_tiles(monkeypatch):
    """Rows are longer than a tile."""
    monkeypatch.setattr(launch, "FEATURES_PER_TILE", 16)
    launch._launches.clear()
    yield
    launch._launches.clear()


SIZES = [(5, 1), (130, 3), (3, 20), (7, 64)]


@pytest.mark.usefixtures("poisoned_memory")
class TestKernels:
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    @pytest.mark.parametrize("order", [0, 1])
    def test_chain(self, sizes, order):
        check(*chain(PLANE, "euclidean"), *sizes, order=order)

    @pytest.mark.parametrize("order", [0, 1, 2])
    def test_chain_of_a_null_metric(self, order):
        check(*chain(NULL, "metric"), 60, 20, order=order)

    @pytest.mark.parametrize("order", [0, 1])
    def test_chain_of_eight_blades(self, order):
        check(*chain(SPACE, "euclidean"), 5, 20, order=order)

    @pytest.mark.parametrize("weighted", [(), ("weighted",)], ids=["plain", "weighted"])
    @pytest.mark.parametrize("order", [0, 1])
    def test_product(self, weighted, order):
        check(*product(SPACE, weighted=weighted), 9, 20, order=order)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("order", [0, 1])
    def test_dtypes(self, dtype, order):
        check(*chain(PLANE, "euclidean"), 5, 20, dtype, order=order)

    @pytest.mark.parametrize("order", [0, 1])
    def test_strides(self, order):
        check(*chain(PLANE, "euclidean"), 5, 20, strided=True, order=order)

    @pytest.mark.parametrize("order", [0, 1])
    @pytest.mark.parametrize("strided", [False, True])
    def test_rows_longer_than_a_tile(self, order, strided, short_tiles):
        check(*chain(PLANE, "metric"), 5, 37, strided=strided, order=order)
        check(*product(PLANE, "wedge"), 5, 37, strided=strided, order=order)
        check(*product(PLANE, weighted=("weighted",)), 5, 37, strided=strided, order=order)

    def test_second_gradient_of_long_rows(self, short_tiles):
        check(*chain(PLANE, "euclidean"), 3, 37, order=2)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_parts_sum_over_features_in_their_results_alone(order):
    found = programs.program(chain(PLANE, "euclidean")[0] + " | vjp 111 1" * min(order, 1))
    if order == 2:
        found = programs.program(f"{found.key} | vjp 1111 111")
    *sums, rest = split(found)
    assert sums
    for part in sums:
        (output,) = part.outputs
        assert output.operand.axes == ("row",)
        assert not any(is_row_sum(e) for sum_ in output.components for e in reachable(sum_.args))
    assert not any(is_row_sum(e) for o in rest.outputs for e in reachable(o.components))
    assert [o.operand for o in rest.outputs] == [o.operand for o in found.outputs]


@pytest.mark.parametrize("strided", [False, True])
def test_sums_of_sums(strided, short_tiles):
    """z = x Σ x Σ x: the second sum waits for the first."""
    x = Operand("x", 1, ("row", "feature"))
    (e,) = x.leaves()
    z = e * total(e * total(e, {"feature"}), {"feature"})
    found = Program("sums of sums", (x,), (Output(x._replace(name="z"), (z,)),))
    (a,) = inputs = operands(found, 50, 37, torch.float32, strided)
    (result,) = launch.run(found, inputs)
    exact, plain = (
        b * (b * b.sum(-1, keepdim=True)).sum(-1, keepdim=True) for b in (a.double(), a)
    )
    assert_as_accurate(result, exact, plain_error(plain, exact, torch.float32))
    assert len(split(found)) == 3


def is_row_sum(e):
    return e.kind == "total" and e.data == {"feature"}


@pytest.mark.parametrize(("rows", "features"), [(0, 8), (3, 0)])
def test_nothing_to_compute(rows, features):
    key, _ = chain(PLANE, "euclidean")
    found = programs.program(f"{key} | vjp 111 1")
    results = launch.run(found, operands(found, rows, features, torch.float32, False))
    assert [r.shape for r in results] == [(4, rows, features), (4, rows, features), (10, features)]
    assert not any(r.any() for r in results)


def test_gradients_repeat_to_the_bit():
    key, _ = chain(PLANE, "euclidean")
    found = programs.program(f"{key} | vjp 111 1")
    inputs = operands(found, 50, 20, torch.float32, False)
    first, second = launch.run(found, inputs), launch.run(found, inputs)
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
