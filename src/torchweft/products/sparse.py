"""Products over infos: `sparse_{op}` and `sparse_scale`, differentiable to any order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.errors import DTypeError, ShapeError
from torchweft.products.checks import LAYOUTS, rows_in
from torchweft.products.forms import accumulator
from torchweft.products.infos import SparseProductInfo, SparseScaleInfo
from torchweft.products.ops import apply, publish
from torchweft.products.plan import Tables

__all__ = [
    "sparse_inner",
    "sparse_mat_t_vec",
    "sparse_mul",
    "sparse_outer",
    "sparse_scale",
    "sparse_scavec",
    "sparse_vecmat",
    "sparse_vecsca",
]

_casts: TensorCache[Tensor] = TensorCache()

_DOC = """`indexed_{op}_scale_gather` over the tables of an info.

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


def _sparse(op: str) -> Callable[..., Tensor]:
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
        if not isinstance(info_fwd, SparseProductInfo):
            raise _not_an_info("info_fwd", info_fwd, "SparseProductInfo")
        tables = Tables(
            info_fwd.index1,
            info_fwd.index2,
            info_fwd.seg_out,
            info_fwd.gather_index,
            info_fwd.index_out,
        )
        scale = _cast(info_fwd.scale, input1)
        result = apply(
            op,
            input1,
            input2,
            scale,
            tables,
            accumulate=out_accumulated,
            out_size=info_fwd.out_size,
            backend=backend,
        )
        _check_backward("info_bwd1", info_bwd1, input1, LAYOUTS[op][0])
        _check_backward("info_bwd2", info_bwd2, input2, LAYOUTS[op][1])
        return result

    return publish(function, f"sparse_{op}", _DOC.format(op=op))  # type: ignore[no-any-return]


def sparse_scale(
    input: Tensor,
    info_fwd: SparseScaleInfo,
    info_bwd: SparseScaleInfo | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[n,M] = Σ_{t ∈ segment M} scale[t] · input[n,index[t]]: a sparse matrix times rows.

    Args:
        input: (N, rows, C), or (rows, C) for one n.
        info_fwd: the tables; its scale is cast to the dtype that sums are formed in.
        info_bwd: the tables of the gradient, as `sparse_scale_infos` gives them; it must agree
            with info_fwd in size (the gradient comes from info_fwd's own transpose).
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (N, out_size, C), or (out_size, C), in the input's dtype; differentiable to any order.
    """
    if not isinstance(info_fwd, SparseScaleInfo):
        raise _not_an_info("info_fwd", info_fwd, "SparseScaleInfo")
    tables = Tables(info_fwd.index, None, info_fwd.seg_out, None, info_fwd.index_out)
    scale = _cast(info_fwd.scale, input)
    result = apply("scale", input, None, scale, tables, out_size=info_fwd.out_size, backend=backend)
    _check_backward("info_bwd", info_bwd, input, LAYOUTS["scale"][0])
    return result


def _cast(scale: Tensor | None, like: Tensor) -> Tensor | None:
    """The scale in the dtype sums are formed in; constants are cast once."""
    if scale is None or not isinstance(like, Tensor):
        return scale
    dtype = accumulator(like.dtype)
    if scale.dtype == dtype:
        return scale
    if scale.requires_grad or torch.compiler.is_compiling():
        return scale.to(dtype)
    return _casts.get((scale,), dtype, lambda: scale.to(dtype))


def _check_backward(
    name: str, info: SparseProductInfo | SparseScaleInfo | None, operand: Tensor, layout: str
) -> None:
    if info is None:
        return
    if not isinstance(info, SparseProductInfo | SparseScaleInfo):
        raise _not_an_info(name, info, "SparseProductInfo")
    rows = rows_in(operand.shape, layout)
    if info.out_size is not None and info.out_size != rows:
        raise ShapeError(
            f"{name} gives {info.out_size} rows but the input it belongs to has {rows}: the "
            "gradient needs one row for each row of that input. "
            "Build it with sparse_product_infos(..., in1_size=..., in2_size=...)."
        )


def _not_an_info(name: str, given: object, needed: str) -> DTypeError:
    return DTypeError(
        f"{name} is a {type(given).__name__}: it must be a {needed}. "
        f"Build one with torchweft.products.sparse_product_info or {needed}(...)."
    )


sparse_mul = _sparse("mul")
sparse_outer = _sparse("outer")
sparse_inner = _sparse("inner")
sparse_vecmat = _sparse("vecmat")
sparse_vecsca = _sparse("vecsca")
sparse_scavec = _sparse("scavec")
sparse_mat_t_vec = _sparse("mat_t_vec")
