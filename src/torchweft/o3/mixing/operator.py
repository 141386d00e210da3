"""Operators that mix copies: matrices between blocks of rows, shared, by element or by row.

    z[b, n, m] = Σ_paths factor Σ_u t[b, u, m] W[(b,) u, n]      u, n copies, m components

    torchweft::o3_mix(Tensor a, Tensor b, …, str mixing, str result, …) -> Tensor

All rows share W, the rows of an element do, or each row has its own.  The form Σ z t W is linear in
each of the three, so its derivatives are the same operator with the roles exchanged: of z and W, a
row t; of t and z, a weight.

Where t is a product of channels, t[u, m] = Σ_ab C[a, b, m] x[u, a] y[b], and each row has its own
weights, one kernel computes both and never stores t:

    torchweft::o3_mixed_rows(Tensor[] tensors, str structure, str call, str mixing) -> Tensor[]

This form is linear in x, y, w and z, so its derivatives of every order are calls of the same
operator, as those of channelwise products are.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.backend import interpreted
from torchweft.core.operators.operator import (
    Operator,
    below_transforms,
    compiling,
    constant_when_compiling,
    unwatched,
)
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.operators.tensor_list import (
    ListOperator,
    Rest,
    Results,
    Tensors,
    mapped_as_rows,
)
from torchweft.core.table_copies import copies_of, is_constant, with_views
from torchweft.core.tables import TensorCache
from torchweft.errors import IndexRangeError
from torchweft.o3.backends import executor, refuse_backend
from torchweft.o3.channelwise.calls import forward, read_call
from torchweft.o3.channelwise.operator import ContractionRule
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.channelwise.structure import read as read_structure
from torchweft.o3.mixing.blocks import CopyBlock, Mixing, read
from torchweft.o3.mixing.rows_source import coupled_paths, row_weights
from torchweft.o3.sorting.rows import sorted_by_row

__all__ = ["Numbered", "mix", "mixed_rows", "rows_of_elements", "serves_mix", "serves_mixed_rows"]

_INTERPRETED = interpreted()

SHARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OWN_DTYPES = (*SHARED_DTYPES, torch.float64)
"""Dtypes of rows that kernels take: with shared weights, and with own weights of each row."""

MOST_ROW_WEIGHTS, MOST_ROW_TERMS = 2**14, 2**9
"""Most weights and couplings of a row: kernels spell both out, and compile longer for more."""

_MIXED_FORWARD = str(forward(True))

_OTHERS = {"z": ("t", "w"), "t": ("z", "w"), "w": ("t", "z")}
"""The two operands of each result, in the order of arguments."""


def serves_mix(
    mixing: Mixing | None, rows: Tensor, shared: bool, backend: str | None = None
) -> TypeGuard[Mixing]:
    """Whether there is a mixing and kernels multiply rows like these: on a GPU.

    They take shared weights except in float64, and own weights of each row where each block of t
    has one path.  Otherwise torch multiplies the matrices, if `backend` is "torch" or None.

    Raises:
        BackendError: another backend is requested.
    """
    if backend == "torch":
        return False
    able = mixing is not None and (rows.is_cuda or _INTERPRETED)
    if able and mixing is not None:
        dtypes = SHARED_DTYPES if shared else OWN_DTYPES
        able = rows.dtype in dtypes and (shared or mixing.single)
    if backend is not None and not (able and backend == "triton"):
        refuse_backend(backend, rows.device.type, f"weights that mix copies, in {rows.dtype}")
    return able


def mix(
    mixing: Mixing,
    t: Tensor,
    weight: Tensor,
    elements: ElementRows | None = None,
    *,
    kernels: bool = True,
) -> Tensor:
    """z (rows, width) of t (rows, width) and weights: (width,) for all rows, or (rows, width).

    With the rows of each element, weights are (elements, width), or matrices (copies of t,
    elements, copies of z) one after the other, (elements · width,).  `kernels` is what `serves_mix`
    returned; without kernels torch multiplies element after element.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|factor t W|, K terms a number; with weights that are not
    a row's own TF32 instead where torch.backends.cuda.matmul allows it.  Bitwise repeatable.  Rows
    without a path are zero.
    """
    order, starts = (None, None) if elements is None else elements
    return _mix(t, weight, order, starts, mixing.text, "z", weight.dim() == 1, kernels)


def _mix_body(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    order, starts, text, result, shared, kernels = others
    elements = None if order is None or starts is None else ElementRows(order, starts)
    mixing, a, b = read(text), a.contiguous(), b.contiguous()
    if elements is not None and not kernels:
        return by_torch(mixing, result, a, b, elements, shared).to(a.dtype)
    found: Tensor = executor("mixing", "triton").run_mix(mixing, result, a, b, shared, elements)
    return found


def _mix_fake(a: Tensor, *others: Any) -> Tensor:
    _, _, starts, text, result, shared, _ = others
    elements = None if starts is None else starts.shape[0] - 1
    return a.new_empty(read(text).shape(result, a.shape[0], shared, elements))


def _mix_gradients(
    call: Any, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    a, b, order, starts, text, result, *how = args
    values = dict(zip(_OTHERS[result], (a, b), strict=True)) | {result: grad}
    found: list[Tensor | None] = []
    for slot, flag in zip(_OTHERS[result], needed, strict=True):
        operands = [values[other] for other in _OTHERS[slot]]
        found.append(call(*operands, order, starts, text, slot, *how) if flag else None)
    return tuple(found)


def _mix_batch(call: Any, size: int, dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    """Samples as more rows; one by one where weights of many rows differ between them."""
    a, b, order, *rest = args
    _, _, result, shared, _ = rest
    if order is not None or (shared and (result == "w" or dims[1] is not None)):
        pairs = [
            [x if d is None else x.select(d, i) for x, d in zip((a, b), dims, strict=False)]
            for i in range(size)
        ]
        return torch.stack([call(*pair, order, *rest) for pair in pairs])
    first, second = (
        (x.expand(size, *x.shape) if d is None else x.movedim(d, 0)).flatten(0, 1)
        if x.dim() - (d is not None) == 2
        else x
        for x, d in zip((a, b), dims, strict=False)
    )
    found: Tensor = call(first, second, order, *rest)
    return found.view(size, found.shape[0] // size, found.shape[1])


_mix = Operator(
    "o3_mix",
    "Tensor a, Tensor b, Tensor? order, Tensor? starts, str mixing, str result, bool shared, "
    "bool kernels",
    2,
    2,
    _mix_body,
    _mix_fake,
    _mix_gradients,
    _mix_batch,
)


def serves_mixed_rows(
    mixing: Mixing | None, structure: Structure, rows: Tensor, backend: str | None
) -> TypeGuard[Mixing]:
    """Whether one kernel computes such products: on a GPU, for rows of few weights."""
    if mixing is None or backend not in (None, "triton") or rows.dtype not in OWN_DTYPES:
        return False
    if not (rows.is_cuda or _INTERPRETED):
        return False
    count, terms = _size(structure.text, mixing.text)
    return 0 < count <= MOST_ROW_WEIGHTS and terms <= MOST_ROW_TERMS


@constant_when_compiling
def _size(structure: str, mixing: str) -> tuple[int, int]:
    """Count of a row's weights, and of terms."""
    return _counted(read_structure(structure), read(mixing))


@functools.lru_cache(maxsize=1024)
def _counted(structure: Structure, mixing: Mixing) -> tuple[int, int]:
    paths = (path for _, members in coupled_paths(structure, mixing) for path in members)
    return row_weights(structure, mixing), sum(len(path.entries) for path in paths)


def mixed_rows(
    structure: Structure, mixing: Mixing, x: Tensor, y: Tensor, weight: Tensor
) -> Tensor:
    """z (rows, width) of x, y and weights (rows, width), where `serves_mixed_rows` is True.

    Args:
        structure: a product of channels without weights.
        mixing: of its result, by the weights.
        x: rows of the structure's width.
        y: rows of the structure's width.
        weight: rows of the mixing's width.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|factor C x y w|, K terms a number.  Bitwise repeatable.
    Rows without a path are zero.
    """
    return _mixed_rows([x, y, weight], (structure.text, _MIXED_FORWARD, mixing.text))[0]


class _MixedRowsRule(ContractionRule):
    """Results of derivatives of Σ C x y w z."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, mixing = rest
        launch = executor("mixing", "triton")
        given = read_structure(structure), read(mixing), read_call(call)
        found: list[Tensor] = launch.run_mixed_rows(*given, [t.contiguous() for t in tensors])
        return found

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, mixing = rest
        rows = tensors[0].shape[0]
        widths = read_structure(structure).widths[:2] + read(mixing).widths[1:]
        return [
            tensors[0].new_empty(rows, widths["xyzw".index(slot)])
            for slot, _ in read_call(call).results
        ]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        return mapped_as_rows(call, size, dims, tensors, rest)


_mixed_rows = ListOperator("o3_mixed_rows", "str structure, str call, str mixing", _MixedRowsRule())


class ElementRows(NamedTuple):
    """Rows sorted by element: those of element k are order[starts[k]] .. order[starts[k + 1] - 1].

    Both int32; rows of an element keep their order.
    """

    order: Tensor  # (rows,)
    starts: Tensor  # (elements + 1,)


_element_cache: TensorCache[ElementRows] = TensorCache()


class Numbered(NamedTuple):
    """What an error says of integers that are out of range."""

    name: str
    there_are: str
    todo: str


ELEMENTS = Numbered("element", "weights of {}", "build the module with more num_elements")


def rows_of_elements(element: Tensor, count: int, of: Numbered = ELEMENTS) -> ElementRows:
    """Rows sorted by `element` (rows,), cached as long as the content stays.

    `of` is what an error says that they number.

    On a GPU only a `torchweft.constant` is cached: sorting takes less time than waiting for the
    result of a comparison.  A function of torchweft.capture sorts once in its record.

    Raises:
        IndexRangeError: an element is not in 0..count - 1; checked on a GPU under
            TORCHWEFT_CHECK=1.
    """
    return _sorted_rows(element, count) if compiling() else _cached_rows(element, count, of)


@below_transforms
def _cached_rows(element: Tensor, count: int, of: Numbered) -> ElementRows:
    if not unwatched(element):
        return _sorted_rows(element, count)
    if (run := recorded.Current.run) is not None:
        (element,) = with_views(run, element)
        if not is_constant(element):
            return run.value((element,), ("rows", count), lambda: _checked_rows(element, count, of))
    if element.is_cuda and not is_constant(element):
        return _checked_rows(element, count, of)
    (kept,) = copies_of((element,))
    assert kept is not None
    return _element_cache.get((kept,), count, lambda: _checked_rows(kept, count, of))


def _checked_rows(element: Tensor, count: int, of: Numbered) -> ElementRows:
    checked = os.environ.get("TORCHWEFT_CHECK") == "1" and recorded.Current.run is None
    if element.device.type == "cpu" or checked:
        wrong = ((element < 0) | (element >= count)).nonzero().flatten()
        if wrong.numel():
            row = int(wrong[0])
            raise IndexRangeError(
                f"{of.name}[{row}] is {int(element[row])} but there are "
                f"{of.there_are.format(count)}: every value must lie in 0..{count - 1}. "
                f"Correct {of.name}, or {of.todo}."
            )
    with torch.inference_mode(False):  # autograd keeps tables, which may be made in evaluation
        ((_, starts, order),) = sorted_by_row((element,), (count,), count + len(element))
    return ElementRows(order, starts)


def _sorted_rows(element: Tensor, count: int) -> ElementRows:
    values, order = torch.sort(element.int(), stable=True)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=element.device)
    return ElementRows(order.int(), torch.searchsorted(values, bounds, out_int32=True))


def by_torch(
    mixing: Mixing, result: str, a: Tensor, b: Tensor, elements: ElementRows, shared: bool = False
) -> Tensor:
    """z of (t, w), t of (z, w) or w of (t, z), element after element.

    Weights are as those of `mix`; `shared`: elements are inside each matrix.
    """
    starts = elements.starts.tolist()
    rows, count = a.shape[0], len(starts) - 1
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    out = a.new_zeros(mixing.shape(result, rows, shared, count))
    for element, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        own = elements.order[begin:end].long()
        first = a.index_select(0, own)
        if result == "w":
            second = b.index_select(0, own)
            for t, z, matrix, factor in _matrices(mixing, out, element):
                left, right = _copies(first, t).flatten(0, 1), _copies(second, z).flatten(0, 1)
                torch.mul(left.T @ right, factor, out=matrix)
        else:
            out.index_copy_(0, own, _product(mixing, result, first, b, element))
    return out


def _product(mixing: Mixing, result: str, a: Tensor, weight: Tensor, element: int) -> Tensor:
    """z of t, or t of z; all rows, of one element, by one matrix product of each path.

    torch folds rows and components by itself only where the matrix requires a gradient, so that
    the last bits of eager and of compiled calls would differ.
    """
    out = a.new_zeros(a.shape[0], mixing.width(result))
    for t, z, matrix, factor in _matrices(mixing, weight, element):
        source, to, matrix = (t, z, matrix) if result == "z" else (z, t, matrix.T)
        copies = _copies(a, source)
        rows = (copies.flatten(0, 1) @ matrix).view(*copies.shape[:2], matrix.shape[1])
        _copies(out, to).add_(rows, alpha=factor)
    return out


def _matrices(
    mixing: Mixing, weight: Tensor, element: int
) -> Iterator[tuple[CopyBlock, CopyBlock, Tensor, float]]:
    """Each path's blocks, its matrix (copies of t, copies of z) as a view, and its factor."""
    for path in mixing.paths:
        t, z = mixing.t[path.t], mixing.z[path.z]
        begin, end = path.weight, path.weight + t.copies * z.copies
        if weight.dim() == 2:
            matrix = weight[element, begin:end].view(t.copies, z.copies)
        else:
            count = len(weight) // mixing.width("w")
            matrix = weight[begin * count : end * count].view(t.copies, count, z.copies)[:, element]
        yield t, z, matrix, path.factor


def _copies(rows: Tensor, block: CopyBlock) -> Tensor:
    """(rows, components, copies), a view."""
    shape = (rows.shape[0], block.components, block.copies)
    steps = (rows.shape[1], block.step, block.copy_step)
    return rows.as_strided(shape, steps, rows.storage_offset() + block.offset)
