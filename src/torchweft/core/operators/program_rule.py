"""Derivatives of operators that run programs: the gradient of a program is a program again.

The first non-tensor argument of such an operator is the key p of a program.  The gradient of the
call is the call with the key "p | vjp …", its tangent the one with "p | jvp …": the tensors of the
call, then the cotangents or tangents; see core.expressions.program.

An operand of a program may be several tensors of a call, from which kernels compute it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchweft.core.expressions.program import Program, mask
from torchweft.core.operators.tensor_list import CachedCall, Call, Rest, Tensors

__all__ = ["ProgramRule"]

T = TypeVar("T")


class ProgramRule:
    """Gradients and tangents; subclasses add body, fake and batch.

    Args:
        program: the program with a key.
        tables: the number of tensors behind those of the program.
    """

    predictable = True

    def __init__(self, program: Callable[[str], Program], tables: int = 0) -> None:
        self.program, self._tables = program, tables
        self._used = functools.lru_cache(maxsize=1024)(lambda key: program(key).reads())

    def inputs(self, rest: Rest) -> Sequence[int]:
        """How many tensors each input of the program is.

        Those that are more than one have the shapes of as many tensors from the second on.
        """
        return (1,) * len(self._used(rest[0]))

    def outputs(self, rest: Rest, count: int) -> Sequence[int]:
        """How many each of its outputs is, of so many."""
        return (1,) * count

    def saved(self, results: Tensors) -> Tensors:
        """Nothing: derivatives need no results."""
        return ()

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Of the inputs that need one and that the program reads: a program again."""
        found: list[Tensor | None] = [None] * len(tensors)
        sizes, used = self.inputs(rest), self._used(rest[0])
        wanted = [any(flags) for flags in _parts(needed, sizes)]
        wanted = [flag and read for flag, read in zip(wanted, used, strict=True)]
        given, shown = _given(tensors, grads, self.outputs(rest, len(grads)))
        if given and any(wanted):
            step = f"vjp {mask(wanted)} {shown}"
            results = iter(self._call(call, tensors, given, rest, step))
            place = 0
            for flag, size in zip(wanted, sizes, strict=True):
                if flag:
                    found[place : place + size] = [next(results) for _ in range(size)]
                place += size
        return [g if flag else None for g, flag in zip(found, needed, strict=True)]

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Along the directions: a program again."""
        moved, shown = _given(tensors, directions, self.inputs(rest))
        return list(self._call(call, tensors, moved, rest, f"jvp {shown}"))

    def _call(
        self, call: Call, tensors: Tensors, more: list[Tensor], rest: Rest, step: str
    ) -> Tensors:
        count = len(tensors) - self._tables
        every = [*tensors[:count], *more, *tensors[count:]]
        return call(every, _followed(rest, step, count + len(more)))


def _parts(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """As many neighbours as each size says."""
    place = 0
    for size in sizes:
        yield items[place : place + size]
        place += size


def _given(
    tensors: Tensors, found: Sequence[Tensor | None], sizes: Sequence[int]
) -> tuple[list[Tensor], str]:
    """The operands that are there, zeros where one lacks a tensor, and which they are."""
    operands, flags = list[Tensor](), []
    for part in _parts(found, sizes):
        flags.append(any(tensor is not None for tensor in part))
        if flags[-1]:
            operands += (
                torch.zeros_like(tensors[1 + n]) if tensor is None else tensor
                for n, tensor in enumerate(part)
            )
    return operands, mask(flags)


def _followed(rest: Rest, step: str, floats: int) -> Rest:
    """Of a derived call; known again where that is kept."""
    if type(rest) is not CachedCall:
        name, *others = rest
        return (f"{name} | {step}", *others)
    if step not in rest.derived:
        further = _followed(tuple(rest), step, floats)
        rest.derived[step] = CachedCall(further, floats, rest.prepare)
    known: Rest = rest.derived[step]
    return known
