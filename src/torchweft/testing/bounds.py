"""How large an error may be: computed per element, never typed in.

    |out − exact| ≤ u_out·|exact| + (4√K·u_acc + 2·u_in)·S + tiny

`exact` is the float64 oracle of the same inputs, S the oracle of their absolute values, K the
number of terms that an element sums; u_out and u_acc are the unit round-offs of the result and of
the accumulator, u_in is 2⁻¹⁰ where a call allows TF32, else 0: tensor cores read 11 significant
bits of a float32 and ignore the others, so they do not round it.  Rounding errors of random signs
grow with √K, so inputs must be random: constants break the bound (and prove nothing).

That is for sums of products.  What holds a root or a transcendental function is measured against
the same formula in plain PyTorch, see `assert_as_accurate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "accuracy_ratio",
    "assert_as_accurate",
    "assert_within_bound",
    "bound_ratio",
    "error_bound",
    "plain_error",
]

TF32_CUT_OFF = 2.0**-10


def error_bound(
    exact: Tensor,
    magnitude: Tensor,
    terms: int | Tensor,
    dtype: torch.dtype,
    *,
    tf32: bool = False,
    stored: int = 0,
) -> Tensor:
    """u_out·|exact| + (4√K·u_acc + 2·u_in)·S + tiny, per element, in float64.

    Args:
        exact: the oracle's value, float64.
        magnitude: S, the oracle of the absolute values of the inputs, like `exact`.
        terms: K, one number or one per element.
        dtype: of the result; sums are in float32, for float64 in float64.
        tf32: whether the call may cut the factors of its products off to TF32.
        stored: how many results on the way are stored in `dtype`; each adds u_out·S.
    """
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    count = torch.as_tensor(terms, dtype=torch.float64, device=exact.device).clamp(min=1)
    of_sum = 4 * count.sqrt() * _round_off(accumulator) + 2 * TF32_CUT_OFF * tf32
    of_results = _round_off(dtype) * (exact.abs() + stored * magnitude)
    return of_results + of_sum * magnitude + torch.finfo(dtype).tiny


def bound_ratio(
    out: Tensor,
    exact: Tensor,
    magnitude: Tensor,
    terms: int | Tensor,
    *,
    tf32: bool = False,
    stored: int = 0,
) -> Tensor:
    """|out − exact| / bound, per element of `out`; NaN and infinities count as infinite."""
    bound = error_bound(exact, magnitude, terms, out.dtype, tf32=tf32, stored=stored)
    ratio = (out.double() - exact).abs() / bound
    return ratio.nan_to_num(nan=float("inf"))


def assert_within_bound(
    out: Tensor,
    exact: Tensor,
    magnitude: Tensor,
    terms: int | Tensor,
    *,
    tf32: bool = False,
    stored: int = 0,
) -> float:
    """Every element of `out` is within `error_bound` of `exact`, or AssertionError says which not.

    Args:
        out: the result under test, in its own dtype.
        exact: the oracle's value, float64, of the shape of `out`.
        magnitude: S, the oracle of the absolute values of the inputs.
        terms: K, the number of terms that an element sums: one number, or one per element.
        tf32: whether the call may cut the factors of its products off to TF32.
        stored: how many results on the way are stored in the dtype of `out`.

    Returns:
        The worst ratio of error to bound, for the record.
    """
    if out.shape != exact.shape:
        raise AssertionError(f"out is {tuple(out.shape)}, exact is {tuple(exact.shape)}")
    if not out.numel():
        return 0.0
    out, exact = out.detach(), exact.detach()
    ratio = bound_ratio(out, exact, magnitude.detach(), terms, tf32=tf32, stored=stored)
    worst = float(ratio.max())
    if worst > 1:
        at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"element {at} of {tuple(out.shape)} is {float(out[at]):.8g}, exact is "
            f"{float(exact[at]):.8g}: {worst:.3g} times its bound "
            f"({int((ratio > 1).sum())} of {ratio.numel()} elements are past theirs)"
        )
    return worst


def plain_error(plain: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """|plain − exact|, the noise that a formula has in plain PyTorch, for results in `dtype`.

    float64 has no wider oracle: its noise is that of float32 by the ratio of their round-offs, and
    half as much again, since the oracle errs too: twice the noise of the result, once its own.

    Args:
        plain: the formula in the accumulator's dtype; in float32 where `dtype` is float64.
        exact: the formula in float64.
        dtype: of the result under test.
    """
    error = (plain.detach().double() - exact.detach()).abs()
    if dtype != torch.float64:
        return error
    return 1.5 * error * _round_off(dtype) / _round_off(plain.dtype)


def accuracy_ratio(out: Tensor, exact: Tensor, noise: Tensor) -> float:
    """Error over twice the noise, of the maxima and of the RMS, the worse of both; right is ≤ 1.

    The RMS of n numbers is known to a part 1/√n only: that is added to what is allowed.  The error
    of `out` is what exceeds its one rounding: |out − exact| − u|exact|, per element.
    """
    out, exact = out.detach(), exact.detach()
    if not out.numel():
        return 0.0
    rounding = _round_off(out.dtype) * exact.abs() + torch.finfo(out.dtype).tiny
    error = ((out.double() - exact).abs() - rounding).clamp(min=0)
    spread = torch.tensor([1, 1 + error.numel() ** -0.5], device=error.device)
    ratios = _largest_and_rms(error) / (2 * spread * _largest_and_rms(noise))
    return float(ratios.where(error.any(), 0).nan_to_num(nan=float("inf")).max())


def assert_as_accurate(out: Tensor, exact: Tensor, noise: Tensor) -> float:
    """The error of `out` is at most twice that of plain PyTorch, in maximum and in RMS.

    For operations that are no sums of products.  The rounding of `out` to its own dtype is not
    counted, so a half-precision result must be within half an ulp of the exact result of its
    inputs, plus float32 noise.

    Args:
        out: the result under test, in its own dtype.
        exact: the formula in float64, of the shape of `out`.
        noise: errors of the same formula in plain PyTorch, see `plain_error`; of any shape, for
            one call or several.

    Returns:
        The worse ratio of the error to twice the noise, for the record.
    """
    if out.shape != exact.shape:
        raise AssertionError(f"out is {tuple(out.shape)}, exact is {tuple(exact.shape)}")
    out, exact = out.detach(), exact.detach()
    ratio = accuracy_ratio(out, exact, noise)
    if ratio > 1:
        error = (out.double() - exact).abs().nan_to_num(nan=float("inf"))
        at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"element {at} of {tuple(out.shape)} is {float(out[at]):.8g}, exact is "
            f"{float(exact[at]):.8g}: the errors are {2 * ratio:.3g} times those of plain "
            f"PyTorch, whose largest is {float(noise.max()):.3g}"
        )
    return ratio


def _largest_and_rms(error: Tensor) -> Tensor:
    return torch.stack([error.max(), error.square().mean().sqrt()])


def _round_off(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
