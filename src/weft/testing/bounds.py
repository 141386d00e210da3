"""How large an error may be: computed per element, never typed in.

    |out − exact| ≤ u_out·|exact| + (4√K·u_acc + 2·u_in)·S + tiny

`exact` is the float64 oracle of the same inputs, S the oracle of their absolute values, K the
number of terms that an element sums; u_out and u_acc are the unit round-offs of the result and of
the accumulator, u_in is 2⁻¹¹ where a call allows TF32, else 0.  Rounding errors of random signs
grow with √K, so inputs must be random: constants break the bound (and prove nothing).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_within_bound", "bound_ratio", "error_bound"]

TF32_ROUND_OFF = 2.0**-11


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
        tf32: whether the call may round the factors of its products to TF32.
        stored: how many results on the way are stored in `dtype`; each adds u_out·S.
    """
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    count = torch.as_tensor(terms, dtype=torch.float64, device=exact.device).clamp(min=1)
    of_sum = 4 * count.sqrt() * _round_off(accumulator) + 2 * TF32_ROUND_OFF * tf32
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
        tf32: whether the call may round the factors of its products to TF32.
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


def _round_off(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
