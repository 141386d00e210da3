"""`Genred` whose axis comes from its output: "a = Vi(1)" reduces over j."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

from torchweft.errors import ShapeError
from torchweft.reductions.formula.parse import parse_variable
from torchweft.reductions.genred import Genred
from torchweft.reductions.keywords import GenredKeywords

__all__ = ["generic", "generic_argkmin", "generic_argmin", "generic_logsumexp", "generic_sum"]

G = TypeVar("G", bound=Genred)


def generic_sum(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """Σ f over the axis that `output` gives.

    Args:
        formula: the formula string, as of `Genred`.
        output: the variable of the result, "a = Vi(E)" to reduce over j, "a = Vj(E)" over i.
        aliases: declarations of the variables, "x = Vi(3)", in the order of the arguments.
        options: the other keywords of `Genred`.

    Returns:
        The `Genred`: a function of one tensor for each variable.

    Raises:
        ShapeError: an output that is a parameter, or a formula that cannot be read.

    Example:
        >>> import torch
        >>> from torchweft.reductions import generic_sum
        >>> aliases = "x = Vi(2)", "y = Vj(2)", "b = Vj(1)"
        >>> moment = generic_sum("SqDist(x, y) * b", "a = Vi(1)", *aliases)
        >>> moment(torch.zeros(3, 2), torch.ones(4, 2), torch.ones(4, 1)).tolist()
        [[8.0], [8.0], [8.0]]
    """
    return generic(Genred, "Sum", formula, output, aliases, options)


def generic_logsumexp(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """log Σ exp(f) over the axis that `output` gives.

    Args:
        formula: the formula string, as of `Genred`.
        output: the variable of the result, "a = Vi(1)" to reduce over j, "a = Vj(1)" over i.
        aliases: declarations of the variables, "x = Vi(3)", in the order of the arguments.
        options: the other keywords of `Genred`.

    Returns:
        The `Genred`: a function of one tensor for each variable.

    Raises:
        ShapeError: an output that is a parameter, or a formula that cannot be read.

    Example:
        >>> import torch
        >>> from torchweft.reductions import generic_logsumexp
        >>> soft = generic_logsumexp("-SqDist(x, y)", "a = Vi(1)", "x = Vi(2)", "y = Vj(2)")
        >>> soft(torch.zeros(3, 2), torch.ones(4, 2)).shape
        torch.Size([3, 1])
    """
    return generic(Genred, "LogSumExp", formula, output, aliases, options)


def generic_argmin(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """The index of the smallest f over the axis that `output` gives.

    Args:
        formula: the formula string, as of `Genred`.
        output: the variable of the result, "a = Vi(1)" to reduce over j, "a = Vj(1)" over i.
        aliases: declarations of the variables, "x = Vi(3)", in the order of the arguments.
        options: the other keywords of `Genred`.

    Returns:
        The `Genred`: a function of one tensor for each variable.

    Raises:
        ShapeError: an output that is a parameter, or a formula that cannot be read.

    Example:
        >>> import torch
        >>> from torchweft.reductions import generic_argmin
        >>> nearest = generic_argmin("SqDist(x, y)", "a = Vi(1)", "x = Vi(1)", "y = Vj(1)")
        >>> nearest(torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [5.0], [8.0]])).tolist()
        [[0], [2]]
    """
    return generic(Genred, "ArgMin", formula, output, aliases, options)


def generic_argkmin(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """The indices of the K smallest f, ascending, over the axis that `output` gives.

    Args:
        formula: the formula string, as of `Genred`.
        output: the variable of the result, "a = Vi(K)" to reduce over j, "a = Vj(K)" over i.
        aliases: declarations of the variables, "x = Vi(3)", in the order of the arguments.
        options: the other keywords of `Genred`.

    Returns:
        The `Genred`: a function of one tensor for each variable.

    Raises:
        ShapeError: an output that is a parameter, or a formula that cannot be read.

    Example:
        >>> import torch
        >>> from torchweft.reductions import generic_argkmin
        >>> nearest = generic_argkmin("SqDist(x, y)", "a = Vi(2)", "x = Vi(1)", "y = Vj(1)")
        >>> nearest(torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [5.0], [8.0]])).tolist()
        [[0, 1], [2, 1]]
    """
    return generic(Genred, "ArgKMin", formula, output, aliases, options)


def generic(
    cls: type[G],
    reduction_op: str,
    formula: str,
    output: str,
    aliases: tuple[str, ...],
    options: Mapping[str, Any],
) -> G:
    """The reduction whose result is the variable `output`."""
    result = parse_variable(output)
    if result.cat == 2:
        raise ShapeError(
            f"the output is {output!r}: it must be Vi(D), which reduces over j, or Vj(D), over i. "
            "Change it."
        )
    if reduction_op == "ArgKMin":
        options = {"opt_arg": result.dim, **options}
    return cls(formula, aliases, reduction_op, axis=1 - result.cat, **options)
