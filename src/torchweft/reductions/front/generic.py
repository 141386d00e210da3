"""Reductions of formula strings whose axis is told by what they return: "a = Vi(1)" is over j."""

from __future__ import annotations

from typing import Any, TypeVar

from torchweft.errors import ShapeError
from torchweft.reductions.formula.parse import parse_variable
from torchweft.reductions.front.genred import Genred

__all__ = ["generic_argkmin", "generic_argmin", "generic_logsumexp", "generic_sum"]

G = TypeVar("G", bound=Genred)


def generic_sum(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """Σ f: `Genred` whose axis comes from `output`, as "a = Vi(2)"."""
    return generic(Genred, "Sum", formula, output, aliases, options)


def generic_logsumexp(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """log Σ exp(f): `Genred` whose axis comes from `output`, as "a = Vi(1)"."""
    return generic(Genred, "LogSumExp", formula, output, aliases, options)


def generic_argmin(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """The index of the smallest f: `Genred` whose axis comes from `output`, as "a = Vi(1)"."""
    return generic(Genred, "ArgMin", formula, output, aliases, options)


def generic_argkmin(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """The indices of the K smallest f: axis and K come from `output`, as "a = Vi(K)"."""
    return generic(Genred, "ArgKMin", formula, output, aliases, options)


def generic(
    cls: type[G],
    reduction_op: str,
    formula: str,
    output: str,
    aliases: tuple[str, ...],
    options: dict[str, Any],
) -> G:
    """The reduction whose result is the variable `output`."""
    result = parse_variable(output)
    if result.cat == 2:
        raise ShapeError(
            f"the output is {output!r}: it must be Vi(D), which reduces over j, or Vj(D), over i. "
            "Change it."
        )
    if reduction_op == "ArgKMin":
        options = {"opt_arg": result.dim} | options
    return cls(formula, aliases, reduction_op, axis=1 - result.cat, **options)
