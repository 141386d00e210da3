"""Index tables are built below torch.func's transforms, which they outlive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from torchweft.core.private import (
    functorch,
    temporarily_clear_interpreter_stack,
    transforms_active,
)
from torchweft.errors import ShapeError

__all__ = ["below_transforms", "mapped_as_rows"]

P = ParamSpec("P")
R = TypeVar("R")


def below_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of index tensors as if no transform were active.

    A tensor that is made under `torch.func.grad` is a wrapper that dies with the transform; a
    table that is kept must not be one, nor one that a kernel reads by its address.

    Raises:
        ShapeError: a tensor among the arguments is mapped by `torch.vmap`.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not transforms_active():
            return function(*args, **kwargs)
        plain = [_plain(a) if isinstance(a, Tensor) else a for a in args]
        with temporarily_clear_interpreter_stack():
            return function(*plain, **kwargs)  # type: ignore[arg-type]

    return run


def _plain(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise ShapeError(
                f"an index tensor of shape {tuple(tensor.shape)} is mapped by torch.vmap: tables "
                "are the same for all samples of a map. Map features and weights only, or call "
                "once for each table."
            )
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def mapped_as_rows(
    call: Callable[[Sequence[Tensor], tuple[Any, ...]], Sequence[Tensor]],
    size: int,
    dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    rest: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """A mapped call of an operator on rows (rows, width): the samples are more rows."""
    rows = [
        (t.expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip(tensors, dims, strict=True)
    ]
    return tuple(r.view(size, r.shape[0] // size, r.shape[1]) for r in call(rows, rest))
