"""The operator of symmetric contractions in one kernel: gradients of any order are programs again.

    weft::o3_symmetric(Tensor[] tensors, str program, str layout) -> Tensor[]

Tensors are the program's, (N, D) for x and z and (elements, products, C) for weights, then each
row's element and the rows by element.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.explain import record_cost, recording
from weft.core.list_op import Call, ListOperator, Rest, Results, Tensors
from weft.core.program import mask
from weft.errors import ShapeError
from weft.o3.irreps import Irreps
from weft.o3.mixing_kinds import Kinds
from weft.o3.symmetric_program import slots, steps, used

__all__ = ["contract"]

TABLES = 3
"""element, and the order and starts of rows by element."""


def contract(
    name: str, layout: str, x: Tensor, weights: Tensor, element: Tensor, rows: Kinds
) -> Tensor:
    """z of the program with a key.

    Args:
        name: the key.
        layout: of the rows of x and z.
        x: (N, D).
        weights: (elements, products, C).
        element: (N,).
        rows: the rows by element.
    """
    return _contract([x, weights, element, *rows], (name, layout))[0]


class Contraction:
    """Results of a program and its derivatives."""

    def body(self, tensors: Tensors, name: str, layout: str) -> list[Tensor]:
        """The results on real tensors."""
        floats = [t.contiguous() for t in tensors[:-TABLES]]
        element, *rows = tensors[-TABLES:]
        # imported when needed: tracing needs no Triton
        run = importlib.import_module("weft.o3.symmetric_launch").run
        results: list[Tensor] = run(name, layout, floats, element, Kinds(*rows))
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, steps(name) * len(element) * floats[1].shape[2])
        return results

    def fake(self, tensors: Tensors, name: str, layout: str) -> list[Tensor]:
        """Empty tensors of their shapes."""
        x, w = tensors[:2]
        outs = sum(ir.dim for _, ir in Irreps(name.split(" ")[1]))
        shapes = {"x": x.shape, "w": w.shape, "z": (x.shape[0], outs * w.shape[2])}
        return [x.new_empty(shapes[slot]) for slot in slots(name).outputs]

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
        name, layout = rest
        found: list[Tensor | None] = [None] * len(tensors)
        wanted = [flag and read for flag, read in zip(needed, used(name), strict=False)]
        given = [g for g in grads if g is not None]
        if given and any(wanted):
            turned = f"{name} | vjp {mask(wanted)} {mask([g is not None for g in grads])}"
            every = [*tensors[:-TABLES], *given, *tensors[-TABLES:]]
            results = iter(call(every, (turned, layout)))
            found[: len(wanted)] = [next(results) if flag else None for flag in wanted]
        return found

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Along the directions: a program again."""
        name, layout = rest
        moved = [d for d in directions[:-TABLES] if d is not None]
        turned = f"{name} | jvp {mask([d is not None for d in directions[:-TABLES]])}"
        return list(call([*tensors[:-TABLES], *moved, *tensors[-TABLES:]], (turned, layout)))

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """Of a mapped call, sample after sample."""
        if any(dim is not None for dim in dims[-TABLES:]):
            raise ShapeError(
                "the elements of rows were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map x and weights only, or call once for each."
            )
        each = [
            call(
                [t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)],
                rest,
            )
            for i in range(size)
        ]
        return tuple(torch.stack(found) for found in zip(*each, strict=True))


_contract = ListOperator("o3_symmetric", "str program, str layout", Contraction())
