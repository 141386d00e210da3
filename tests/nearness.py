"""A front end's formula against the same of dense tensors, in float64."""

import torch

ROUND_OFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32)}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(out, expected):
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def check(function, dense, inputs):
    """function is computed in float64, as dense is.

    Its largest error is nearer to the noise of float64 than to that of float32, which is what the
    dense formula in float32 is off: below it by the root of the ratio of the round-offs.
    """
    exact = dense(*inputs)
    noise = (dense(*(t.float() for t in inputs)).double() - exact).abs().max()
    ratio = ROUND_OFF[torch.float64] / ROUND_OFF[torch.float32]
    out = function(*inputs)
    assert (out.shape, out.dtype) == (exact.shape, torch.float64)
    error = (out - exact).abs().max()
    assert error <= noise * ratio**0.5, f"off by {error:.3g}, float32 by {noise:.3g}"
