"""Variables as lazy tensors, by what they vary with: i, j, or neither."""

from __future__ import annotations

from torchweft.reductions.lazy.tensors import Data, LazyTensor

__all__ = ["Pm", "Var", "Vi", "Vj"]


def Var(  # noqa: N802
    x_or_ind: Data, dim: int | None = None, cat: int | None = None
) -> LazyTensor:
    """A variable of category `cat`: 0 varies with i, 1 with j, 2 is a parameter.

    Args:
        x_or_ind: data, (..., M, D) of category 0, (..., N, D) of 1, (..., D) of 2, whose leading
            dimensions are batches; or, with `dim`, the index of an argument of the callable that a
            reduction returns.
        dim: D of a symbolic variable.
        cat: the category; None takes it from the shape of the data, as `LazyTensor` does.

    Returns:
        The lazy tensor.

    Raises:
        ShapeError: the shape does not fit the category.
        DTypeError: data that are not floating-point or complex.

    Example:
        >>> import torch
        >>> from torchweft.reductions import Var
        >>> Var(torch.rand(5, 3), cat=0).shape, Var(0, dim=3, cat=1).shape
        ((5, 1, 3), (1, 1, 3))
    """
    return LazyTensor._of_category(x_or_ind, dim, cat)


def Vi(x_or_ind: Data, dim: int | None = None) -> LazyTensor:  # noqa: N802
    """Data (..., M, D) that varies with i, or with `dim` a symbolic variable.

    Args:
        x_or_ind: a tensor (..., M, D), whose leading dimensions are batches;
            or, with `dim`, the index of an argument of the callable that a reduction returns.
        dim: D of a symbolic variable.

    Returns:
        The lazy tensor.

    Raises:
        ShapeError: a tensor of fewer dimensions.
        DTypeError: data that are not floating-point or complex.

    Example:
        >>> import torch
        >>> from torchweft.reductions import Vi
        >>> Vi(torch.rand(5, 3)).shape, Vi(0, 3).shape
        ((5, 1, 3), (1, 1, 3))
    """
    return Var(x_or_ind, dim, 0)


def Vj(x_or_ind: Data, dim: int | None = None) -> LazyTensor:  # noqa: N802
    """Data (..., N, D) that varies with j, or with `dim` a symbolic variable.

    Args:
        x_or_ind: a tensor (..., N, D), whose leading dimensions are batches;
            or, with `dim`, the index of an argument of the callable that a reduction returns.
        dim: D of a symbolic variable.

    Returns:
        The lazy tensor.

    Raises:
        ShapeError: a tensor of fewer dimensions.
        DTypeError: data that are not floating-point or complex.

    Example:
        >>> import torch
        >>> from torchweft.reductions import Vj
        >>> Vj(torch.rand(5, 3)).shape, Vj(1, 3).shape
        ((1, 5, 3), (1, 1, 3))
    """
    return Var(x_or_ind, dim, 1)


def Pm(x_or_ind: Data, dim: int | None = None) -> LazyTensor:  # noqa: N802
    """A parameter (..., D), or with `dim` a symbolic variable.

    Args:
        x_or_ind: a number, a list of numbers or a tensor (..., D), whose leading dimensions are
            batches; or, with `dim`, the index of an argument of the callable that a reduction
            returns.
        dim: D of a symbolic variable.

    Returns:
        The lazy tensor.

    Raises:
        ShapeError: a tensor of fewer dimensions.
        DTypeError: data that are not floating-point or complex.

    Example:
        >>> import torch
        >>> from torchweft.reductions import Pm
        >>> Pm(0.5).shape, Pm(2, 1).shape
        ((1, 1), (1, 1))
    """
    return Var(x_or_ind, dim, 2)
