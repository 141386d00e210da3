"""Device code that tells whether numbers are within a bound."""

# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def within_kernel(x_ptr, guard_ptr, count, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """guard = 0 if any |x| exceeds MOST or is NaN; else it stays as it is.

    Programs that write all write the same.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.minimum(i, count - 1))
    if tl.min((tl.abs(x) <= MOST).to(tl.int32)) == 0:
        tl.store(guard_ptr, 0)
