"""Results against those of a plain formula, by the noise that its results in float32 have."""

import torch

from torchweft.testing import accuracy_ratio, plain_error

DRAWS = 4, 16, 64
ROUND_OFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32)}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(out, expected):
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def beside(inputs, seed):
    """In float32, each number moved to one beside it: torch's error at the very ones is luck."""
    generator = torch.Generator().manual_seed(seed)
    signs = [2 * torch.randint(0, 2, a.shape, generator=generator) - 1 for a in inputs]
    eps = torch.finfo(torch.float32).eps
    return [a.float() * (1 + eps * sign) for a, sign in zip(inputs, signs, strict=True)]


def model_beside(model, seed):
    """The model in float32, with the numbers beside its parameters."""
    with torch.no_grad():
        parameters = list(model.float().parameters())
        for parameter, moved in zip(parameters, beside(parameters, seed), strict=True):
            parameter.copy_(moved)
    return model


def check_named(found, exact, draw):
    """Results by name in float64 are as accurate as a formula's, by few draws or by more.

    Args:
        found: the results under test.
        exact: the formula's.
        draw: a function of a seed that returns the formula's of numbers `beside`, cached.
    """
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert found[name].shape == value.shape, name
        for draws in DRAWS:
            noise = [plain_error(draw(seed)[name], value, torch.float64) for seed in range(draws)]
            ratio = accuracy_ratio(found[name], value, torch.stack(noise))
            if ratio <= 1:
                break
        else:
            raise AssertionError(f"{name}: {ratio:.3g} of what {draws} draws of float32 allow")


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
