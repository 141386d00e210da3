"""The keywords of reductions: of their call, and of how numbers are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from torchweft.errors import DTypeError
from torchweft.reductions.call import Options

__all__ = [
    "ACCURACY_KEYWORDS",
    "CALL_KEYWORDS",
    "DEFAULT_OPTIONS",
    "AccuracyKeywords",
    "CallKeywords",
    "Called",
    "GenredKeywords",
    "Keywords",
    "Uncalled",
    "accuracy",
    "require_keywords",
]

PRECISIONS = (None, "ieee", "tf32x3", "tf32", "bf16")
SCHEMES = ("auto", "direct_sum", "block_sum", "kahan_scheme")
ACCUMULATORS = ("auto", "float16", "float32", "float64")


class CallKeywords(TypedDict, total=False):
    """The keywords of a reduction's call, see `Genred`."""

    backend: str | None
    device_id: int
    ranges: Any
    out: Any


class AccuracyKeywords(TypedDict, total=False):
    """The keywords of `accuracy`, and those of pykeops that have no effect."""

    dtype: Any
    cuda_type: Any
    dtype_acc: str
    use_double_acc: bool
    sum_scheme: str
    enable_chunks: bool
    rec_multVar_highdim: Any  # pykeops' name
    use_fast_math: bool
    precision: str | None


class Keywords(CallKeywords, AccuracyKeywords, total=False):
    """The keywords of a lazy tensor's reduction."""


class Called(Keywords, total=False):
    """Those of a reduction that is computed at once."""

    call: Literal[True]


class Uncalled(Keywords, total=False):
    """Those of a reduction that is returned as a callable."""

    call: Required[Literal[False]]


class GenredKeywords(AccuracyKeywords, total=False):
    """The keywords of `Genred` that generic functions take."""

    opt_arg: int | None
    formula2: str | None


CALL_KEYWORDS = tuple(CallKeywords.__annotations__)
ACCURACY_KEYWORDS = tuple(AccuracyKeywords.__annotations__)


def accuracy(
    dtype_acc: str = "auto",
    use_double_acc: bool = False,
    sum_scheme: str = "auto",
    precision: str | None = None,
    **_without_effect: Any,
) -> Options:
    """The options of pykeops' keywords; sums are at least as accurate as these require."""
    for name, value, known in (
        ("dtype_acc", dtype_acc, ACCUMULATORS),
        ("sum_scheme", sum_scheme, SCHEMES),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise DTypeError(
                f"{name} is {value!r}: it must be one of {', '.join(map(repr, known))}. "
                "Pass one of them, or leave it out."
            )
    if use_double_acc and dtype_acc not in ("auto", "float64"):
        raise DTypeError(
            f"use_double_acc is given with dtype_acc={dtype_acc!r}: they must say the same. "
            "Leave one out."
        )
    if use_double_acc or dtype_acc == "float64":
        return Options(precision, "float64")
    return Options(precision, "kahan" if sum_scheme == "kahan_scheme" else "auto")


DEFAULT_OPTIONS = accuracy()
"""The default options."""


def require_keywords(name: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise TypeError for a keyword that is not known."""
    for keyword in given:
        if keyword not in known:
            raise TypeError(
                f"{name} is given the keyword {keyword!r}: it takes {', '.join(known)}. Leave it "
                "out, or pass one of these."
            )
