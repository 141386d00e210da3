"""The public products: sums over index tables, and over infos that carry the tables.

    z[n,m] = Σ_{k = seg[m]}^{seg[m+1]-1} scale[t] · input1[n,index1[t]] ∘ input2[n,index2[t]]

with t = gather_index[k], or k itself.  Each of the seven products has seven functions:
`indexed_{op}_scale_gather`, five forms of it with fewer arguments, and `sparse_{op}`.  All are
differentiable to any order.  Source: the sum behind e3nn's tensor products, message passing and
segment operations, see docs/families/products.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor

from torchweft.core.explain import Explanation, explain
from torchweft.core.expressions.program import accumulator
from torchweft.core.operators.operands import narrowed
from torchweft.core.private import any_autocast
from torchweft.core.table_copies import copies_of, is_constant, unreadable
from torchweft.core.tables import TensorCache
from torchweft.errors import ShapeError
from torchweft.products.docstrings import docstring
from torchweft.products.forms import (
    CANONICAL,
    LAYOUTS,
    admit,
    check_out,
    metas,
    rows_as_vectors,
    rows_in,
)
from torchweft.products.infos import SparseProductInfo, SparseScaleInfo, Tables, as_info, largest
from torchweft.products.operator import product

P = ParamSpec("P")


class ProductFunction(Protocol[P]):
    """A public function of a product."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """The product."""

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """What a call launches, and the bytes and operations that it cannot avoid; it runs once.

        The arguments are those of the function.  The `Explanation` has the fields name, launches
        (of each its backend, kernel, tile, number of programs and workspace), bytes_min and flops;
        `print` shows it as text.
        """


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
    # symbols of a traced call are not hashable
    found = (admit.__wrapped__ if compiling else admit)(op, metas(tensors))
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


def _indexed_op_scale_gather(
    op: str,
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
    if out is None:
        return result
    check_out(out, result)
    return out.copy_(result)


def _indexed_op(
    op: str,
    input1: Tensor,
    input2: Tensor,
    index1: Tensor | None = None,
    index2: Tensor | None = None,
    out: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    return _indexed_op_scale_gather(
        op, input1, input2, None, index1, index2, out=out, backend=backend
    )


def _indexed_op_scale_segment(
    op: str,
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
    return _indexed_op_scale_gather(
        op, input1, input2, scale, index1, index2, seg, out=out, backend=backend
    )


def _op_segment(
    op: str,
    input1: Tensor,
    input2: Tensor,
    seg: Tensor,
    out: Tensor | None = None,
    *,
    accumulated: bool = False,
    backend: str | None = None,
) -> Tensor:
    return _indexed_op_segment(
        op, input1, input2, None, None, seg, out, accumulated=accumulated, backend=backend
    )


def _indexed_op_segment(
    op: str,
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
    return _indexed_op_scale_gather(
        op, input1, input2, None, index1, index2, seg,
        out=out, out_accumulated=accumulated, backend=backend,
    )  # fmt: skip


def _accumulated_indexed_op_segment(
    op: str,
    input1: Tensor,
    input2: Tensor,
    index1: Tensor | None = None,
    index2: Tensor | None = None,
    seg: Tensor | None = None,
    out: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    return _indexed_op_segment(
        op, input1, input2, index1, index2, seg, out, accumulated=True, backend=backend
    )


def _sparse_op(
    op: str,
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


def _published(form: Callable[Concatenate[str, P], Tensor], op: str) -> ProductFunction[P]:
    """The public function of a form and a product, with its docstring and `explain`."""
    name = form.__name__[1:].replace("op", op)
    own: Any = FunctionType(form.__code__, form.__globals__, name, form.__defaults__)
    own.__kwdefaults__, own.__qualname__ = form.__kwdefaults__, name  # for errors of its call

    def function(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        result: Tensor = own(op, *args, **kwargs)
        return result

    def explained(*args: P.args, **kwargs: P.kwargs) -> Explanation:
        return explain(function, *args, **kwargs)

    signature = inspect.signature(form)
    _, *parameters = signature.parameters.values()
    signature = signature.replace(parameters=parameters)
    published: Any = function
    # code of its own: torch.compile counts recompilations by code object
    published.__code__ = function.__code__.replace(co_name=name)
    _describe(published, name, docstring(form.__name__[1:], op, signature), signature)
    published.explain = explained
    signature = signature.replace(return_annotation="Explanation")
    _describe(explained, f"{name}.explain", ProductFunction.explain.__doc__, signature)
    return published  # type: ignore[no-any-return]


def _describe(function: Any, name: str, doc: str | None, signature: inspect.Signature) -> None:
    """Give a function of any arguments the name, docstring and parameters that it shows."""
    function.__qualname__, function.__doc__, function.__signature__ = name, doc, signature
    function.__name__ = name.rpartition(".")[2]
    annotations = {p.name: p.annotation for p in signature.parameters.values()}
    function.__annotations__ = annotations | {"return": signature.return_annotation}


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

    Raises:
        WeftError: an input or an info that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|scale x|, K terms a row, u the dtype's unit round-off,
    u_acc that of float32 (float64 for float64).

    Cost: each input row that is named is read, and the output written, once.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> forward, backward = products.sparse_scale_infos([0, 2, 2], [0, 0, 1], [1.0, 2.0, 3.0])
        >>> products.sparse_scale(torch.tensor([[1.0], [5.0], [2.0]]), forward).tolist()
        [[5.0], [6.0]]
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


indexed_mul_scale_gather = _published(_indexed_op_scale_gather, "mul")
indexed_mul = _published(_indexed_op, "mul")
indexed_mul_scale_segment = _published(_indexed_op_scale_segment, "mul")
mul_segment = _published(_op_segment, "mul")
indexed_mul_segment = _published(_indexed_op_segment, "mul")
accumulated_indexed_mul_segment = _published(_accumulated_indexed_op_segment, "mul")
sparse_mul = _published(_sparse_op, "mul")

indexed_outer_scale_gather = _published(_indexed_op_scale_gather, "outer")
indexed_outer = _published(_indexed_op, "outer")
indexed_outer_scale_segment = _published(_indexed_op_scale_segment, "outer")
outer_segment = _published(_op_segment, "outer")
indexed_outer_segment = _published(_indexed_op_segment, "outer")
accumulated_indexed_outer_segment = _published(_accumulated_indexed_op_segment, "outer")
sparse_outer = _published(_sparse_op, "outer")

indexed_inner_scale_gather = _published(_indexed_op_scale_gather, "inner")
indexed_inner = _published(_indexed_op, "inner")
indexed_inner_scale_segment = _published(_indexed_op_scale_segment, "inner")
inner_segment = _published(_op_segment, "inner")
indexed_inner_segment = _published(_indexed_op_segment, "inner")
accumulated_indexed_inner_segment = _published(_accumulated_indexed_op_segment, "inner")
sparse_inner = _published(_sparse_op, "inner")

indexed_vecmat_scale_gather = _published(_indexed_op_scale_gather, "vecmat")
indexed_vecmat = _published(_indexed_op, "vecmat")
indexed_vecmat_scale_segment = _published(_indexed_op_scale_segment, "vecmat")
vecmat_segment = _published(_op_segment, "vecmat")
indexed_vecmat_segment = _published(_indexed_op_segment, "vecmat")
accumulated_indexed_vecmat_segment = _published(_accumulated_indexed_op_segment, "vecmat")
sparse_vecmat = _published(_sparse_op, "vecmat")

indexed_vecsca_scale_gather = _published(_indexed_op_scale_gather, "vecsca")
indexed_vecsca = _published(_indexed_op, "vecsca")
indexed_vecsca_scale_segment = _published(_indexed_op_scale_segment, "vecsca")
vecsca_segment = _published(_op_segment, "vecsca")
indexed_vecsca_segment = _published(_indexed_op_segment, "vecsca")
accumulated_indexed_vecsca_segment = _published(_accumulated_indexed_op_segment, "vecsca")
sparse_vecsca = _published(_sparse_op, "vecsca")

indexed_scavec_scale_gather = _published(_indexed_op_scale_gather, "scavec")
indexed_scavec = _published(_indexed_op, "scavec")
indexed_scavec_scale_segment = _published(_indexed_op_scale_segment, "scavec")
scavec_segment = _published(_op_segment, "scavec")
indexed_scavec_segment = _published(_indexed_op_segment, "scavec")
accumulated_indexed_scavec_segment = _published(_accumulated_indexed_op_segment, "scavec")
sparse_scavec = _published(_sparse_op, "scavec")

indexed_mat_t_vec_scale_gather = _published(_indexed_op_scale_gather, "mat_t_vec")
indexed_mat_t_vec = _published(_indexed_op, "mat_t_vec")
indexed_mat_t_vec_scale_segment = _published(_indexed_op_scale_segment, "mat_t_vec")
mat_t_vec_segment = _published(_op_segment, "mat_t_vec")
indexed_mat_t_vec_segment = _published(_indexed_op_segment, "mat_t_vec")
accumulated_indexed_mat_t_vec_segment = _published(_accumulated_indexed_op_segment, "mat_t_vec")
sparse_mat_t_vec = _published(_sparse_op, "mat_t_vec")

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
