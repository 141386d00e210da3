"""The repaired interpreter computes what a GPU would; the sanitizer finds what a GPU would hide.

Seen red: each test of `TestRepairs` without `interpreter.install()`; each planted bug of
`TestSanitizer` without `sanitizer.install()`.
"""

import pytest
import torch

from tests.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("the interpreter needs TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

pytestmark = pytest.mark.kernels


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))


@triton.jit
def sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)) + tl.full((BLOCK,), 1.5, tl.bfloat16)
    tl.store(out_ptr, tl.reduce(x, 0, larger))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    tile = r[:, None] * BLOCK + r[None, :]
    tl.store(out_ptr + tile, tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile)))


@triton.jit
def atomic_kernel(index_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + tl.load(index_ptr + i), tl.load(x_ptr + i), sem="relaxed")


@triton.jit
def range_kernel(bounds_ptr, x_ptr, out_ptr):
    total = 0.0
    for i in range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1)):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)


@triton.jit
def outer_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i)[:, None], tl.load(y_ptr + i)[None, :]
    tl.store(out_ptr + i[:, None] * BLOCK + i[None, :], (x * y + 2) - 0.5 * x)


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


class TestRepairs:
    x, y = randn(64).bfloat16(), randn(64, seed=1).bfloat16()

    def test_bf16_add_adds_floats(self):
        add_kernel[(1,)](self.x, self.y, out := torch.empty_like(self.x), 64)
        same(out, self.x + self.y)

    def test_cast_to_bf16_rounds_to_nearest(self):
        cast_kernel[(1,)](randn(64), out := torch.empty_like(self.x), 64)
        same(out, randn(64).bfloat16())

    def test_bf16_sum(self):
        sum_kernel[(1,)](torch.ones(64).bfloat16(), out := torch.empty(1).bfloat16(), 64)
        same(out, torch.tensor([64.0]).bfloat16())

    def test_bf16_constant_and_reduce(self):
        reduce_kernel[(1,)](self.x, out := torch.empty(1).bfloat16(), 64)
        same(out, (self.x + 1.5).amax().reshape(1))

    def test_bf16_dot_of_integers_is_exact(self):
        a, b = (randn(16, 16, seed=s).mul(4).round().bfloat16() for s in (0, 1))
        dot_kernel[(1,)](a, b, out := torch.empty(16, 16), 16)
        same(out, a.float() @ b.float())

    def test_bf16_atomic_add(self):
        index = torch.arange(64) % 4
        atomic_kernel[(1,)](index, self.x, out := torch.zeros(4).bfloat16(), 64)
        same(out, torch.zeros(4).bfloat16().index_add_(0, index, self.x))

    def test_autotune_needs_no_driver(self):
        x, out = randn(64), torch.empty(64)
        tuned_kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, out, 64)
        same(out, 2 * x)

    def test_operands_are_converted_at_every_launch(self):
        counts = torch.arange(16, dtype=torch.int32)
        for x in (randn(16), counts, randn(16, seed=1).double(), 3 - counts):
            for y in (randn(16, seed=2), randn(16, seed=3)):
                outer_kernel[(1,)](x, y, out := torch.empty(16, 16, dtype=torch.float64), 16)
                x, y = (a.double() if x.dtype == torch.float64 else a.float() for a in (x, y))
                same(out, ((x[:, None] * y + 2) - 0.5 * x[:, None]).double())

    def test_range_takes_loaded_bounds(self):
        range_kernel[(1,)](torch.tensor([3, 17]), torch.ones(64), out := torch.empty(1))
        same(out, torch.tensor([14.0]))


@triton.jit
def double_kernel(x_ptr, out_ptr, n, MASKED: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside) if MASKED else tl.load(x_ptr + i)
    tl.store(out_ptr + i, 2 * x, mask=inside)


@triton.jit
def total_kernel(x_ptr, segment_ptr, out_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = tl.load(x_ptr + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.load(segment_ptr + program), tl.sum(x))


@triton.jit
def scatter_kernel(index_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.load(index_ptr + i), tl.load(x_ptr + i))


@triton.jit
def chain_kernel(x_ptr):
    program = tl.program_id(0)
    tl.store(x_ptr + program + 1, tl.load(x_ptr + program) + 1)


class TestSanitizer:
    x = torch.arange(128.0)
    same_cell = torch.zeros(64, dtype=torch.int64)

    def test_a_right_kernel_passes(self):
        double_kernel[(2,)](self.x[:100], out := torch.zeros(128), 100, True, 64, 64)
        same(out[:100], 2 * self.x[:100])

    def test_missing_mask(self):
        with pytest.raises(InterpreterError, match=r"double_kernel: load out of bounds in 28 of"):
            double_kernel[(2,)](self.x[:100], torch.zeros(128), 100, False, 64, 64)

    def test_programs_that_overlap(self):
        with pytest.raises(InterpreterError, match="store to the same cell"):
            double_kernel[(2,)](self.x, torch.zeros(128), 128, True, 32, 64)

    def test_programs_that_share_an_output(self):
        with pytest.raises(InterpreterError, match="store to the same cell"):
            total_kernel[(2,)](self.x, self.same_cell, torch.zeros(128), 64)

    def test_lanes_that_collide(self):
        with pytest.raises(InterpreterError, match="hit the same address"):
            scatter_kernel[(1,)](self.same_cell, self.x, torch.zeros(128), 64)

    def test_order_dependence(self):
        with pytest.raises(InterpreterError, match="loads a cell that program"):
            chain_kernel[(3,)](torch.zeros(4))
