"""Programs on the CPU: printed loops and torch against plain torch, at sizes around a tile.

Seen red with: a row stride kept for operands without rows, one temporary shared by two phases,
operands read in place with the stride of another, a run of tasks that no thread takes.
"""

import functools

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.clifford import Algebra, reference
from torchweft.clifford.programs import operator as cpu
from torchweft.clifford.programs import programs
from torchweft.core.cpu import loops as loops
from torchweft.core.expressions.expr import const, multiply
from torchweft.core.expressions.program import Operand, Output, Program
from torchweft.testing.contract import assert_same_bits

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)

EPS = 1.0  # that of the contract's cases: loops in float32 are theirs
ALGEBRAS = [Algebra((1, 1)), Algebra((0, 1))]


@pytest.fixture(autouse=True)
def compiled_whatever_the_size(monkeypatch):
    monkeypatch.setattr(cpu, "COMPILED", 0)


def problem(kind, algebra, rows, features, dtype=torch.float64):
    """A program's key, the same by the oracle, and random inputs."""
    generator = torch.Generator().manual_seed(rows + features)
    shapes = [(algebra.num_blades, rows, features)] * 2
    shapes += [(len(algebra.paths), features)] * (kind != "plain")
    inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    if kind == "plain":
        return (
            programs.key("product", algebra, "geometric"),
            functools.partial(reference.product, algebra=algebra),
            inputs,
        )
    if kind == "weighted":
        key = programs.key("product", algebra, "geometric", "weighted")
        return key, lambda x, y, w: reference.product(x, y, algebra, w.T), inputs
    key = programs.key("chain", algebra, "euclidean", EPS.hex())

    def chain(x, y, w):
        o = reference.product(reference.gate(x), reference.gate(y), algebra, w.T)
        return reference.rms_norm(o, algebra, "euclidean", EPS)

    return key, chain, inputs


def check(runner, kind, algebra, rows, features):
    """Forward and gradients: float64 to its round-off, counted in sums."""
    key, oracle, inputs = problem(kind, algebra, rows, features)
    leaves = [a.clone().requires_grad_() for a in inputs]
    expected = oracle(*leaves)
    grad = torch.randn(expected.shape, dtype=expected.dtype)
    gradients = torch.autograd.grad(expected, leaves, grad)
    found = runner(programs.program(key), inputs)
    derived = f"{key} | vjp {'1' * len(inputs)} 1"
    found += runner(programs.program(derived), [*inputs, grad])
    for a, b in zip(found, [expected.detach(), *gradients], strict=True):
        assert a.is_contiguous()
        noise = 64 * torch.finfo(a.dtype).eps * (rows * features * algebra.num_blades) ** 0.5
        assert float((a - b).abs().max()) <= noise * float(b.abs().max())


@pytest.mark.parametrize("runner", [cpu.run_numba, cpu.run_torch])
@pytest.mark.parametrize(
    ("kind", "algebra"),
    [("plain", ALGEBRAS[1]), ("weighted", ALGEBRAS[0]), ("chain", ALGEBRAS[0])],
)
def test_values_and_gradients(runner, kind, algebra):
    for rows, features in [(3, 1), (70, 5), (2, 600)]:  # many rows a tile, many tiles a row
        check(runner, kind, algebra, rows, features)


@pytest.mark.parametrize("straight", [0, loops.STRAIGHT])
def test_terms_walked_from_a_table(straight, monkeypatch):
    monkeypatch.setattr(loops, "STRAIGHT", straight)
    loops.printed_loop.cache_clear()
    check(cpu.run_numba, "chain", ALGEBRAS[0], 9, 33)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_strides_any_dtype(dtype):
    key, _, (x, y, w) = problem("weighted", ALGEBRAS[0], 8, 6, dtype)
    program = programs.program(key)
    expected = cpu.run_numba(program, [x, y[:, :1].expand(-1, 8, -1).contiguous(), w])
    last = x.movedim(0, -1).contiguous().movedim(-1, 0)
    found = cpu.run_numba(program, [last, y[:, :1].expand(-1, 8, -1), w])
    assert_same_bits(found[0], expected[0], "strided inputs")
    assert found[0].dtype == dtype


def test_contiguous_operands_are_read_in_place():
    key, oracle, (x, y) = problem("plain", ALGEBRAS[1], 70, 5)
    program = programs.program(key)
    assert "load(block" not in loops.printed_loop(program, "float64", contiguous=True).source
    last = y.movedim(0, -1).contiguous().movedim(-1, 0)
    apart = y.new_zeros(len(y), 75, 5)[:, 5:].copy_(y)  # components further apart than those of x
    bound = 64 * torch.finfo(x.dtype).eps * float(oracle(x, y).abs().max())
    for other in (y, last, apart):
        (found,) = cpu.run_numba(program, [x, other])
        assert float((found - oracle(x, y)).abs().max()) <= bound


def test_results_that_are_operands():
    operand = Operand("x", 2, ("row", "feature"))
    a, b = operand.leaves()
    result = Output(operand._replace(name="z", size=3), (b, multiply(a, b), const(0)))
    x = torch.randn(2, 70, 5)
    (found,) = cpu.run_numba(Program("swapped", (operand,), (result,)), [x])
    assert_same_bits(found, torch.stack([x[1], x[0] * x[1], 0 * x[0]]), "copied and multiplied")


@pytest.mark.parametrize("runner", [cpu.run_numba, cpu.run_torch])
def test_no_rows(runner):
    key, _, inputs = problem("weighted", ALGEBRAS[0], 0, 4)
    results = runner(programs.program(f"{key} | vjp 111 1"), [*inputs, inputs[0]])
    assert [tuple(r.shape) for r in results] == [(4, 0, 4), (4, 0, 4), (10, 4)]
    assert not results[2].any()


@pytest.mark.parametrize("runner", [cpu.run_numba, cpu.run_torch])
def test_the_same_bits_on_any_number_of_threads(runner):
    key, _, inputs = problem("chain", ALGEBRAS[0], 20_000, 7, torch.float32)  # three tasks
    program = programs.program(f"{key} | vjp 111 1")
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(runner(program, [*inputs, inputs[0]]))
    torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert_same_bits(two, one, "two threads against one")
