"""The three trilinear forms behind the seven products, their derivatives, and checks of operands.

    a, b, c vectors:          Σ_c   a_c b_c g_c      mul in each slot
    u, v vectors, W matrix:   Σ_cd  u_c W_cd v_d     vecmat, mat_t_vec, outer
    u, v vectors, a scalar:   Σ_c   a u_c v_c        vecsca, scavec, inner

Each product is such a form with one slot left open, so its derivatives are products again, of
any order.  `scavec(x, y) = vecsca(y, x)` and `mat_t_vec(x, y) = vecmat(y, x)`, so five products
need kernels; `scale` (no second operand) is the sixth.

Checks use metadata only, and run once for each combination of metadata: a `Meta` is what a check
needs of a tensor, and it is hashable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.expressions.program import accumulator
from torchweft.core.operators.operands import check_tensors, not_strided
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.products.infos import Sizes, Tables

__all__ = [
    "CANONICAL",
    "LAYOUTS",
    "PRODUCTS",
    "Product",
    "admit",
    "batch_of",
    "check_out",
    "metas",
    "result_channels",
    "rows_as_vectors",
    "rows_in",
]


class Product(NamedTuple):
    """Dimensions after the row axis of (first, second, result), and the derivatives.

    A derivative is (product, roles): the two of a (first), b (second), c (the gradient) that it
    reads, in its own order, and the slot of its result.  A capital letter is a transposed matrix.
    """

    dims: tuple[int, int, int]
    first: tuple[str, str]
    second: tuple[str, str] | None


PRODUCTS = {
    "mul": Product((1, 1, 1), ("mul", "cba"), ("mul", "acb")),
    "outer": Product((1, 1, 2), ("vecmat", "bCa"), ("vecmat", "acb")),
    "inner": Product((1, 1, 0), ("vecsca", "bca"), ("vecsca", "acb")),
    "vecmat": Product((1, 2, 1), ("vecmat", "cBa"), ("outer", "acb")),
    "vecsca": Product((1, 0, 1), ("vecsca", "cba"), ("inner", "acb")),
    "scale": Product((1, 0, 1), ("scale", "c_a"), None),
}
"""The products that have kernels.  `scale`: z[n,m] = Σ_t s[t] x[n,index1[t]]."""

CANONICAL = {
    "mul": ("mul", False),
    "outer": ("outer", False),
    "inner": ("inner", False),
    "vecmat": ("vecmat", False),
    "vecsca": ("vecsca", False),
    "scavec": ("vecsca", True),
    "mat_t_vec": ("vecmat", True),
    "scale": ("scale", False),
}
"""The product behind each public name, and whether its operands are exchanged."""


def batch_of(op: str, operand: Tensor | None, slot: int = 0) -> int | None:
    """N of an operand; None if it is shared over N, or absent."""
    if operand is None or operand.dim() == PRODUCTS[op].dims[slot] + 1:
        return None
    return operand.shape[0]


def result_channels(op: str, first: Tensor, second: Tensor | None) -> tuple[int, ...]:
    """The dimensions of a row of the result."""
    if op == "inner":
        return ()
    if op == "vecmat" and second is not None:
        return (second.shape[-1],)
    if op == "outer" and second is not None:
        return (first.shape[-1], second.shape[-1])
    return (first.shape[-1],)


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)

LAYOUTS = {
    "mul": ("(N, rows, C)", "(N, rows, C)"),
    "outer": ("(N, rows, C1)", "(N, rows, C2)"),
    "inner": ("(N, rows, C)", "(N, rows, C)"),
    "vecmat": ("(N, rows, Cin)", "(N, rows, Cin, Cout)"),
    "vecsca": ("(N, rows, C)", "(N, rows)"),
    "scavec": ("(N, rows)", "(N, rows, C)"),
    "mat_t_vec": ("(N, rows, Cin, Cout)", "(N, rows, Cin)"),
    "scale": ("(N, rows, C)", ""),
}
"""The shapes of the inputs; without the leading N an input is shared over N."""

_CHANNELS = {"mul": (-1, -1), "inner": (-1, -1), "vecmat": (-1, -2), "mat_t_vec": (-2, -1)}
"""The dimensions of the two inputs that must be equal."""


_VECTORS = {"mul": (0, 1), "inner": (0, 1), "vecsca": (0,), "scavec": (1,), "scale": (0,)}
"""The inputs whose rows are vectors of elements that nothing but a sum over all of them mixes."""


def rows_as_vectors(op: str, *inputs: Tensor | None) -> tuple[list[Any], Shape] | None:
    """Inputs with rows of another rank as inputs with vectors, and the shape that rows had.

    (rows,) becomes (rows, 1) and (N, rows, A, B, ...) becomes (N, rows, C).  None where rows are
    vectors already, and where inputs do not go together, of which the checks of the call tell.
    """
    slots = _VECTORS.get(op, ())
    for slot in slots:
        given = inputs[slot]
        if not isinstance(given, Tensor) or given.dim() in (0, 2, 3) or given.is_nested:
            return None
    found: list[Any] = list(inputs)
    rows = {tuple(found[slot].shape[2:]) for slot in slots}
    if len(rows) != 1:
        return None
    for slot in slots:
        found[slot] = found[slot].flatten(2) if found[slot].dim() > 1 else found[slot][:, None]
    return found, rows.pop()


Shape = tuple[int, ...]
Meta = tuple[Shape, torch.dtype, torch.device, torch.layout]
Metas = tuple[Meta | None, ...]
"""The metadata of all tensors of a call, in the order of `NAMES`."""

NAMES = ("input1", "input2", "scale", *Tables._fields)


def metas(tensors: Sequence[Tensor | None]) -> Metas:
    """(shape, dtype, device, layout) of each tensor of a call."""
    try:
        return tuple(
            [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in tensors]
        )
    except (AttributeError, RuntimeError):  # no tensor, or a nested one, which has no shape
        for name, tensor in zip(NAMES, tensors, strict=True):
            if tensor is not None:
                check_tensors(**{name: tensor})
        raise


@functools.lru_cache(maxsize=4096)
def admit(op: str, metas: Metas) -> Sizes:
    """The sizes of a valid call; z is the number of segments (terms) before index_out.

    Raises:
        ShapeError, DTypeError, DeviceError: an argument is not valid.
    """
    for name, given in zip(NAMES, metas, strict=True):
        if given is not None and given[3] is not torch.strided:
            raise not_strided(name, given[3])
    input1, input2, scale, *tables = metas
    first = _check_input(op, "input1", input1, LAYOUTS[op][0])
    if op != "scale":
        second = _check_input(op, "input2", input2, LAYOUTS[op][1])
        _check_pair(op, first, second)
    if scale is not None:
        _check_scale(first, scale)
    for name, table in zip(Tables._fields, tables, strict=True):
        _check_table(name, table, first[2])
    return _sizes(op, [None if m is None else m[0] for m in metas])


def _sizes(op: str, shapes: Sequence[Shape | None]) -> Sizes:
    """Rows of each role, from shapes in the order of `NAMES`."""
    shape1, shape2, scale, index1, index2, seg, gather_index, index_out = shapes
    assert shape1 is not None
    layout1, layout2 = LAYOUTS[op]
    rows1 = rows_in(shape1, layout1)
    rows2 = None if shape2 is None else rows_in(shape2, layout2)
    terms = _terms(rows1, rows2, {"index1": index1, "index2": index2, "scale": scale})
    if gather_index is not None and seg is None:
        raise ShapeError(
            f"gather_index ({gather_index[0]} entries) was given without seg: it names the terms "
            "of each segment. Pass seg, or index the inputs by index1 and index2 alone."
        )
    entries = terms if gather_index is None else gather_index[0]
    results = entries if seg is None else seg[0] - 1
    if index_out is not None and index_out[0] != results:
        raise _wrong_length("index_out", index_out[0], results, "segments (or terms)")
    return Sizes(rows1, rows2 or 0, results, terms, entries)


def rows_in(shape: Shape, layout: str) -> int:
    """The rows of an input, with or without N."""
    return shape[0 if len(shape) < _rank(layout) else 1]


def _terms(rows1: int, rows2: int | None, tables: dict[str, Shape | None]) -> int:
    """T: the common length of index1, index2 and scale, else the rows of the inputs."""
    lengths = {name: shape[0] for name, shape in tables.items() if shape is not None}
    if not lengths:
        if rows2 is not None and rows1 != rows2:
            raise ShapeError(
                f"input1 has {rows1} rows and input2 has {rows2}: without index1, index2 and scale "
                "the rows are the terms and must agree. Pass index1 or index2, or equal rows."
            )
        return rows1
    terms = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != terms:
            raise _wrong_length(name, length, terms, "terms")
    for name, rows, index in (("input1", rows1, "index1"), ("input2", rows2, "index2")):
        if rows is not None and index not in lengths and rows < terms:
            raise ShapeError(
                f"{name} has {rows} rows but there are {terms} terms: without {index} each term "
                f"reads a row of its own. Pass {index}, or at least {terms} rows."
            )
    return terms


def _wrong_length(name: str, length: int, needed: int, what: str) -> ShapeError:
    return ShapeError(
        f"{name} has {length} entries but there are {needed} {what}: it must have {needed}. "
        f"Pass {name} with {needed} entries."
    )


def _rank(layout: str) -> int:
    return layout.count(",") + 1


def _check_input(op: str, name: str, given: Meta | None, layout: str) -> Meta:
    if given is None:
        raise DTypeError(f"{name} is None: {op} needs a tensor {layout}. Pass one.")
    shape, dtype, *_ = given
    full = _rank(layout)
    if len(shape) not in (full, full - 1):
        others = ", or rows of one shape in all inputs: numbers, (rows,), or (N, rows, ...)"
        raise ShapeError(
            f"{name} is {tuple(shape)}: {op} needs {layout}, or the same without N to share it "
            f"over N{others if op in _VECTORS else ''}. Reshape {name} to {full} or {full - 1} "
            f"dimensions, e.g. by {name}.{'unsqueeze(-1)' if len(shape) < full else 'flatten(2)'}."
        )
    if dtype not in _FLOATS:
        raise DTypeError(
            f"{name} is {dtype}: products take float64, float32, bfloat16 and float16. "
            f"Convert it, e.g. {name}.float()."
        )
    return given


def _check_pair(op: str, first: Meta, second: Meta) -> None:
    (shape1, dtype1, device1, _), (shape2, dtype2, device2, _) = first, second
    layout1, layout2 = LAYOUTS[op]
    if dtype1 != dtype2:
        raise DTypeError(
            f"input1 is {dtype1} and input2 is {dtype2}: both must have one dtype. "
            f"Convert one of them, e.g. input2.to({dtype1})."
        )
    _check_device("input2", device2, device1)
    both = (len(shape1), len(shape2)) == (_rank(layout1), _rank(layout2))
    if both and shape1[0] != shape2[0]:
        raise ShapeError(
            f"input1 has N = {shape1[0]} and input2 has N = {shape2[0]}: both must have the same "
            "N. Drop the leading dimension of one to share it over N."
        )
    if op in _CHANNELS:
        dim1, dim2 = _CHANNELS[op]
        if shape1[dim1] != shape2[dim2]:
            raise ShapeError(
                f"input1 is {tuple(shape1)} and input2 is {tuple(shape2)}: {op} needs {layout1} "
                f"and {layout2}, but {shape1[dim1]} and {shape2[dim2]} channels differ. "
                "Pass inputs with equal channels (nothing is broadcast)."
            )


def _check_device(name: str, device: torch.device, needed: torch.device) -> None:
    if device != needed:
        raise DeviceError(
            f"{name} is on {device} and input1 on {needed}: all tensors must be on one device. "
            f"Pass {name}.to({str(needed)!r})."
        )


def _check_scale(first: Meta, scale: Meta) -> None:
    shape, dtype, device, _ = scale
    if dtype not in (first[1], accumulator(first[1])):
        raise DTypeError(
            f"scale is {dtype} and input1 is {first[1]}: scale must be {first[1]} or "
            f"{accumulator(first[1])}. Pass scale.to({first[1]})."
        )
    if len(shape) != 1:
        raise ShapeError(f"scale is {tuple(shape)}: it must be (T,). Flatten scale.")
    _check_device("scale", device, first[2])


def _check_table(name: str, table: Meta | None, needed: torch.device) -> None:
    if table is None:
        return
    shape, dtype, device, _ = table
    if dtype not in _INTEGERS:
        raise DTypeError(
            f"{name} is {dtype}: indices must be int32 or int64. Convert it, e.g. {name}.long()."
        )
    if len(shape) != 1 or (name == "seg" and not shape[0]):
        raise ShapeError(
            f"{name} is {tuple(shape)}: it must have one dimension"
            f"{' and at least one bound' if name == 'seg' else ''}. Reshape {name}."
        )
    _check_device(name, device, needed)


def check_out(out: Tensor, result: Tensor) -> None:
    """Raise unless `out` has the result's shape, dtype and device, and no gradient is recorded."""
    check_tensors(out=out)
    shape, dtype, device = out.shape, out.dtype, out.device
    if shape != result.shape:
        raise ShapeError(
            f"out is {tuple(shape)}: this call returns {tuple(result.shape)}. "
            f"Pass torch.empty({tuple(result.shape)}), or leave out= away."
        )
    if dtype != result.dtype:
        raise DTypeError(
            f"out is {dtype}: this call returns {result.dtype}. Pass out in {result.dtype}."
        )
    if device != result.device:
        raise DeviceError(
            f"out is on {device}: this call returns a tensor on {result.device}. "
            f"Pass out on {result.device}."
        )
    if result.requires_grad or out.requires_grad:
        raise DTypeError(
            "out= was given to a call that records gradients: a result written in place has none. "
            "Leave out= away, or call under torch.no_grad()."
        )
