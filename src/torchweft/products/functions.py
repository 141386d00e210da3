"""The public products: sums over index tables, and over infos that carry the tables.

    z[n,m] = Σ_{k = seg[m]}^{seg[m+1]-1} scale[t] · input1[n,index1[t]] ∘ input2[n,index2[t]]

with t = gather_index[k], or k itself.  Each of the seven products has seven functions:
`indexed_{op}_scale_gather`, five forms of it with fewer arguments, and `sparse_{op}`.  All are
differentiable to any order.  Source: the sum behind e3nn's tensor products, message passing and
segment operations, see docs/families/products.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweft.core.explain import explain
from torchweft.core.expressions.program import accumulator
from torchweft.core.operators.operands import narrowed
from torchweft.core.private import any_autocast
from torchweft.core.table_copies import copies_of, is_constant, unreadable
from torchweft.core.tables import TensorCache
from torchweft.errors import ShapeError
from torchweft.products.forms import (
    CANONICAL,
    LAYOUTS,
    admit,
    check_out,
    metas,
    rows_as_vectors,
    rows_in,
    sizes,
)
from torchweft.products.infos import SparseProductInfo, SparseScaleInfo, Tables, as_info, largest
from torchweft.products.operator import product

Function = Callable[..., Tensor]


class ProductFunction(Protocol):
    """A public function of a product."""

    explain: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The product."""


_casts: TensorCache[Tensor] = TensorCache()


def apply(
    op: str,
    input1: Tensor,
    input2: Tensor | None,
    scale: Tensor | None,
    tables: Tables,
    backend: str | None,
    accumulate: bool = False,
    out_size: int | None = None,
) -> Tensor:
    """The product `op` (a public name, or "scale") over index tables: check, size, dispatch."""
    if (found_rows := rows_as_vectors(op, input1, input2)) is not None:
        (input1, input2), row = found_rows
        result = apply(op, input1, input2, scale, tables, backend, accumulate, out_size)
        return result if op == "inner" else result.reshape(*result.shape[:-1], *row)
    if any_autocast():
        input1 = narrowed(input1)
        input2 = None if input2 is None else narrowed(input2)
    tensors = (input1, input2, scale, *tables)
    compiling = torch.compiler.is_compiling()
    if compiling:
        found = sizes(op, [None if t is None else t.shape for t in tensors])
    else:
        found = admit(op, metas(tensors))
    tables = Tables(*copies_of(tables))
    if tables.index_out is not None or out_size is not None:
        found = found._replace(z=_out_rows(found.z, tables.index_out, out_size))
    name, exchanged = CANONICAL[op]
    roles = "x_z" if op == "scale" else "yxz" if exchanged else "xyz"
    if exchanged:
        input1, input2 = input2, input1  # type: ignore[assignment]
    # torch.compile needs a list; a tuple is hashable
    every = list(found) if compiling else found
    return product(input1, input2, scale, *tables, every, name, roles, accumulate, backend)


def _out_rows(results: int, index_out: Tensor | None, out_size: int | None) -> int:
    """M: out_size, or max(index_out) + 1."""
    if out_size is None:
        assert index_out is not None
        if torch.compiler.is_compiling() or unreadable(index_out):
            raise ShapeError(
                "index_out was given without out_size inside torch.compile, export or a function "
                "of torchweft.capture: the number of output rows must not depend on values there. "
                "Pass out_size."
            )
        return largest(index_out) + 1
    if out_size < 0:
        raise ShapeError(f"out_size is {out_size}: it must be 0 or more. Pass the number of rows.")
    if index_out is None and out_size < results:
        raise ShapeError(
            f"out_size is {out_size} but there are {results} segments (or terms): each is a row of "
            f"the output. Pass out_size={results} or more, or an index_out."
        )
    return out_size


_FORMULAS = {
    "mul": ("x[n,i,c] · y[n,j,c]", "(N, M, C)"),
    "outer": ("x[n,i,c] · y[n,j,d]", "(N, M, C1, C2)"),
    "inner": ("Σ_c x[n,i,c] · y[n,j,c]", "(N, M)"),
    "vecmat": ("Σ_c x[n,i,c] · y[n,j,c,d]", "(N, M, Cout)"),
    "vecsca": ("x[n,i,c] · y[n,j]", "(N, M, C)"),
    "scavec": ("x[n,i] · y[n,j,c]", "(N, M, C)"),
    "mat_t_vec": ("Σ_c x[n,i,c,d] · y[n,j,c]", "(N, M, Cout)"),
}

_ROWS = {
    op: f"""\
        Rows of {inputs} may also be numbers, (rows,), or have several dimensions,
        (N, rows, ...){shape}.
"""
    for op, inputs, shape in (
        ("mul", "both inputs", ", of one shape, which those of the result have too"),
        ("inner", "both inputs", ", of one shape, all of which the sum is over"),
        ("vecsca", "input1", "; those of the result have their shape"),
        ("scavec", "input2", "; those of the result have their shape"),
    )
}

_SCALE_GATHER_DOC = """z[n,m] = Σ_{{k ∈ segment m}} s[t] · {formula},  t = gather_index[k].

    Here i = index1[t] and j = index2[t]; x is input1, y is input2, s is scale.

    Args:
        input1: {layout1}; without N it is shared over N.
        input2: {layout2}; without N it is shared over N.
        scale: (T,) in the inputs' dtype or in the one sums are formed in; None is 1.
        index1: (T,) rows of input1, int32 or int64; None is the identity.
        index2: (T,) rows of input2; None is the identity.
        seg: (M+1,) bounds, not decreasing: row m sums the entries seg[m] .. seg[m+1]-1.
            None: every term is a row of its own.
        gather_index: entry k stands for term gather_index[k]; repeats are allowed; needs seg.
        index_out: output row of each segment (or term); equal ones add.
        out: a tensor to write the result into; not together with gradients.
        out_accumulated: sum over n as well; the output has no N.
        out_size: number of output rows M; rows that nothing reaches are zero.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        {result} in the inputs' dtype; without N where out_accumulated or both inputs are shared.
{rows}
    Raises:
        WeftError: inputs or tables that do not fit, with what to do.  Values of tables are checked
            on the CPU always, on a GPU under TORCHWEFT_CHECK=1.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|s x y|, K terms a row, u the dtype's unit round-off,
    u_acc that of float32 (float64 for float64).  Differentiable in input1, input2 and scale, to
    any order; bitwise repeatable; no host synchronisation once the tables' plan exists.
    Moves at least each input row that is named and the output once.
    """

_SPARSE_DOC = """`indexed_{op}_scale_gather` over the tables of an info.

    Args:
        input1: see `indexed_{op}_scale_gather`.
        input2: see `indexed_{op}_scale_gather`.
        info_fwd: the tables; its scale is cast to the dtype that sums are formed in.
        info_bwd1: the tables of the gradient of input1, as `sparse_product_infos` gives them.
            Gradients come from info_fwd's own transposes; this one must agree with it in size.
        info_bwd2: likewise for input2.
        out_accumulated: sum over n as well; the output has no N.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.
    """

_THIN_DOC = "z[n,m] = Σ_{{k ∈ segment m}} {formula}: `indexed_{op}_scale_gather` with {what}."


def _scale_gather(op: str) -> Function:
    def function(
        input1: Tensor,
        input2: Tensor,
        scale: Tensor | None = None,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        seg: Tensor | None = None,
        gather_index: Tensor | None = None,
        index_out: Tensor | None = None,
        out: Tensor | None = None,
        out_accumulated: bool = False,
        out_size: int | None = None,
        backend: str | None = None,
    ) -> Tensor:
        tables = Tables(index1, index2, seg, gather_index, index_out)
        result = apply(op, input1, input2, scale, tables, backend, out_accumulated, out_size)
        return _into(out, result)

    return function


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    """The result, in `out` if that is given."""
    if out is None:
        return result
    check_out(out, result)
    return out.copy_(result)


def _sparse(op: str) -> Function:
    def function(
        input1: Tensor,
        input2: Tensor,
        info_fwd: SparseProductInfo,
        info_bwd1: SparseProductInfo | None = None,
        info_bwd2: SparseProductInfo | None = None,
        out_accumulated: bool = False,
        *,
        backend: str | None = None,
    ) -> Tensor:
        factors, *given, out_size = as_info("info_fwd", info_fwd, SparseProductInfo)
        scale, tables = _cast(factors, input1), Tables(*given)
        result = apply(op, input1, input2, scale, tables, backend, out_accumulated, out_size)
        for name, info, operand, layout in (
            ("info_bwd1", info_bwd1, input1, LAYOUTS[op][0]),
            ("info_bwd2", info_bwd2, input2, LAYOUTS[op][1]),
        ):
            if info is not None:
                size = as_info(name, info, SparseProductInfo).out_size
                _check_backward(name, size, operand, layout)
        return result

    return function


def _thin(op: str, full: Function) -> Iterator[tuple[str, str, Function]]:
    """(name, arguments it has, function) of the five forms with fewer arguments."""

    def indexed(
        input1: Tensor,
        input2: Tensor,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        out: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        return full(input1, input2, None, index1, index2, out=out, backend=backend)

    def indexed_scale_segment(
        input1: Tensor,
        input2: Tensor,
        scale: Tensor | None = None,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        seg: Tensor | None = None,
        out: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        return full(input1, input2, scale, index1, index2, seg, out=out, backend=backend)

    yield f"indexed_{op}", "indices alone", indexed
    yield f"indexed_{op}_scale_segment", "scale, indices and segments", indexed_scale_segment
    yield from _thin_accumulated(op, full)


def _thin_accumulated(op: str, full: Function) -> Iterator[tuple[str, str, Function]]:
    """Those of the five that may sum over n."""

    def segment(
        input1: Tensor,
        input2: Tensor,
        seg: Tensor,
        out: Tensor | None = None,
        *,
        accumulated: bool = False,
        backend: str | None = None,
    ) -> Tensor:
        return full(input1, input2, seg=seg, out=out, out_accumulated=accumulated, backend=backend)

    def indexed_segment(
        input1: Tensor,
        input2: Tensor,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        seg: Tensor | None = None,
        out: Tensor | None = None,
        *,
        accumulated: bool = False,
        backend: str | None = None,
    ) -> Tensor:
        return full(
            input1, input2, None, index1, index2, seg,
            out=out, out_accumulated=accumulated, backend=backend,
        )  # fmt: skip

    def accumulated_indexed_segment(
        input1: Tensor,
        input2: Tensor,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        seg: Tensor | None = None,
        out: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        return indexed_segment(
            input1, input2, index1, index2, seg, out, accumulated=True, backend=backend
        )

    also = "; `accumulated` is its `out_accumulated`"
    yield f"{op}_segment", f"segments alone{also}", segment
    yield f"indexed_{op}_segment", f"indices and segments{also}", indexed_segment
    what = "indices and segments, summed over n"
    yield f"accumulated_indexed_{op}_segment", what, accumulated_indexed_segment


def _published(op: str) -> list[ProductFunction]:
    """The seven public functions of a product, each with its docstring and `.explain`."""
    formula, result = _FORMULAS[op]
    layout1, layout2 = LAYOUTS[op]
    words = {"op": op, "formula": formula, "result": result, "layout1": layout1, "layout2": layout2}
    words["rows"] = _ROWS.get(op, "")
    full = _scale_gather(op)
    return [
        _publish(full, f"indexed_{op}_scale_gather", _SCALE_GATHER_DOC.format(**words)),
        *(
            _publish(function, name, _THIN_DOC.format(what=what, **words))
            for name, what, function in _thin(op, full)
        ),
        _publish(_sparse(op), f"sparse_{op}", _SPARSE_DOC.format(**words)),
    ]


def _publish(function: Any, name: str, doc: str) -> ProductFunction:
    function.__name__ = function.__qualname__ = name
    # code of its own: torch.compile counts recompilations by code object
    function.__code__ = function.__code__.replace(co_name=name)
    function.__doc__ = doc
    function.explain = lambda *args, **kwargs: explain(function, *args, **kwargs)
    published: ProductFunction = function
    return published


def sparse_scale(
    input: Tensor,
    info_fwd: SparseScaleInfo,
    info_bwd: SparseScaleInfo | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[n,M] = Σ_{t ∈ segment M} scale[t] · input[n,index[t]]: a sparse matrix times rows.

    Args:
        input: (N, rows, C), or (rows, C) for one n; also (rows,), a vector, and (N, rows, ...).
        info_fwd: the tables; its scale is cast to the dtype that sums are formed in.
        info_bwd: the tables of the gradient, as `sparse_scale_infos` gives them; it must agree
            with info_fwd in size (the gradient comes from info_fwd's own transpose).
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (N, out_size, C), or the rows' shape of the input, in its dtype; differentiable to any
        order.
    """
    info_fwd = as_info("info_fwd", info_fwd, SparseScaleInfo)
    tables = Tables(info_fwd.index, None, info_fwd.seg_out, None, info_fwd.index_out)
    scale = _cast(info_fwd.scale, input)
    result = apply("scale", input, None, scale, tables, backend, out_size=info_fwd.out_size)
    if info_bwd is not None:
        size = as_info("info_bwd", info_bwd, SparseScaleInfo).out_size
        _check_backward("info_bwd", size, input, LAYOUTS["scale"][0])
    return result


def _cast(scale: Tensor | None, like: Tensor) -> Tensor | None:
    """The scale in the dtype that sums are formed in; a constant one is cast once."""
    if not isinstance(scale, Tensor) or not isinstance(like, Tensor):
        return scale  # the checks of the call raise
    dtype = accumulator(like.dtype)
    if scale.dtype == dtype:
        return scale
    if scale.requires_grad or torch.compiler.is_compiling() or not is_constant(scale):
        return scale.to(dtype)
    return _casts.get((scale,), dtype, lambda: scale.to(dtype))


def _check_backward(name: str, out_size: int | None, operand: Tensor, layout: str) -> None:
    rows = rows_in(operand.shape, layout)
    if out_size is not None and out_size != rows:
        raise ShapeError(
            f"{name} gives {out_size} rows but the input it belongs to has {rows}: the "
            "gradient needs one row for each row of that input. "
            "Build it with sparse_product_infos(..., in1_size=..., in2_size=...)."
        )


(
    indexed_mul_scale_gather,
    indexed_mul,
    indexed_mul_scale_segment,
    mul_segment,
    indexed_mul_segment,
    accumulated_indexed_mul_segment,
    sparse_mul,
) = _published("mul")

(
    indexed_outer_scale_gather,
    indexed_outer,
    indexed_outer_scale_segment,
    outer_segment,
    indexed_outer_segment,
    accumulated_indexed_outer_segment,
    sparse_outer,
) = _published("outer")

(
    indexed_inner_scale_gather,
    indexed_inner,
    indexed_inner_scale_segment,
    inner_segment,
    indexed_inner_segment,
    accumulated_indexed_inner_segment,
    sparse_inner,
) = _published("inner")

(
    indexed_vecmat_scale_gather,
    indexed_vecmat,
    indexed_vecmat_scale_segment,
    vecmat_segment,
    indexed_vecmat_segment,
    accumulated_indexed_vecmat_segment,
    sparse_vecmat,
) = _published("vecmat")

(
    indexed_vecsca_scale_gather,
    indexed_vecsca,
    indexed_vecsca_scale_segment,
    vecsca_segment,
    indexed_vecsca_segment,
    accumulated_indexed_vecsca_segment,
    sparse_vecsca,
) = _published("vecsca")

(
    indexed_scavec_scale_gather,
    indexed_scavec,
    indexed_scavec_scale_segment,
    scavec_segment,
    indexed_scavec_segment,
    accumulated_indexed_scavec_segment,
    sparse_scavec,
) = _published("scavec")

(
    indexed_mat_t_vec_scale_gather,
    indexed_mat_t_vec,
    indexed_mat_t_vec_scale_segment,
    mat_t_vec_segment,
    indexed_mat_t_vec_segment,
    accumulated_indexed_mat_t_vec_segment,
    sparse_mat_t_vec,
) = _published("mat_t_vec")

__all__ = [
    "accumulated_indexed_inner_segment",
    "accumulated_indexed_mat_t_vec_segment",
    "accumulated_indexed_mul_segment",
    "accumulated_indexed_outer_segment",
    "accumulated_indexed_scavec_segment",
    "accumulated_indexed_vecmat_segment",
    "accumulated_indexed_vecsca_segment",
    "indexed_inner",
    "indexed_inner_scale_gather",
    "indexed_inner_scale_segment",
    "indexed_inner_segment",
    "indexed_mat_t_vec",
    "indexed_mat_t_vec_scale_gather",
    "indexed_mat_t_vec_scale_segment",
    "indexed_mat_t_vec_segment",
    "indexed_mul",
    "indexed_mul_scale_gather",
    "indexed_mul_scale_segment",
    "indexed_mul_segment",
    "indexed_outer",
    "indexed_outer_scale_gather",
    "indexed_outer_scale_segment",
    "indexed_outer_segment",
    "indexed_scavec",
    "indexed_scavec_scale_gather",
    "indexed_scavec_scale_segment",
    "indexed_scavec_segment",
    "indexed_vecmat",
    "indexed_vecmat_scale_gather",
    "indexed_vecmat_scale_segment",
    "indexed_vecmat_segment",
    "indexed_vecsca",
    "indexed_vecsca_scale_gather",
    "indexed_vecsca_scale_segment",
    "indexed_vecsca_segment",
    "inner_segment",
    "mat_t_vec_segment",
    "mul_segment",
    "outer_segment",
    "scavec_segment",
    "sparse_inner",
    "sparse_mat_t_vec",
    "sparse_mul",
    "sparse_outer",
    "sparse_scale",
    "sparse_scavec",
    "sparse_vecmat",
    "sparse_vecsca",
    "vecmat_segment",
    "vecsca_segment",
]
