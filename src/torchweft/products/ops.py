"""Indexed, scaled, segmented products: the seven ops and their thin forms.

    z[n,m] = Σ_{k = seg[m]}^{seg[m+1]-1} scale[t] · input1[n,index1[t]] ∘ input2[n,index2[t]]

with t = gather_index[k], or k itself.  Source: the sum behind e3nn's tensor products, message
passing and segment operations, see docs/families/products.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweft.core.explain import explain
from torchweft.core.operators.operands import narrowed
from torchweft.core.private import any_autocast
from torchweft.errors import ShapeError
from torchweft.products.checks import LAYOUTS, admit, check_out, metas, sizes
from torchweft.products.forms import CANONICAL
from torchweft.products.operator import product
from torchweft.products.plan import Tables, largest

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
    "vecmat_segment",
    "vecsca_segment",
]


def apply(
    op: str,
    input1: Tensor,
    input2: Tensor | None,
    scale: Tensor | None,
    tables: Tables,
    *,
    accumulate: bool = False,
    out_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The product of a public name (or "scale") over the caller's tables: check, size, dispatch."""
    if any_autocast():
        input1 = narrowed(input1)
        input2 = None if input2 is None else narrowed(input2)
    tensors = (input1, input2, scale, *tables)
    compiling = torch.compiler.is_compiling()
    if compiling:
        found = sizes(op, [None if t is None else t.shape for t in tensors])
    else:
        found = admit(op, metas(tensors))
    if tables.index_out is not None or out_size is not None:
        found = found._replace(z=_out_rows(found.z, tables.index_out, out_size))
    # a graph holds lists; a tuple is a key as it is
    rest = (list(found) if compiling else found, *_PLACES[op], accumulate, backend)
    if op in _EXCHANGED:
        input1, input2 = input2, input1  # type: ignore[assignment]
    return product(input1, input2, scale, *tables, *rest)


_EXCHANGED = {op for op, (_, exchanged) in CANONICAL.items() if exchanged}
_PLACES = {
    op: (name, "yxz" if exchanged else "xyz") for op, (name, exchanged) in CANONICAL.items()
} | {"scale": ("scale", "x_z")}
"""The product behind each name, and what its operands and its result are indexed by."""


def _out_rows(results: int, index_out: Tensor | None, out_size: int | None) -> int:
    """M: out_size, or max(index_out) + 1."""
    if out_size is None:
        assert index_out is not None
        if torch.compiler.is_compiling():
            raise ShapeError(
                "index_out was given without out_size inside torch.compile or export: the number "
                "of output rows must not depend on values there. Pass out_size."
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


class ScaleGather(Protocol):
    """Signature of `indexed_{op}_scale_gather`."""

    explain: Callable[..., Any]

    def __call__(
        self,
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
    ) -> Tensor: ...


_FORMULAS = {
    "mul": ("x[n,i,c] · y[n,j,c]", "(N, M, C)"),
    "outer": ("x[n,i,c] · y[n,j,d]", "(N, M, C1, C2)"),
    "inner": ("Σ_c x[n,i,c] · y[n,j,c]", "(N, M)"),
    "vecmat": ("Σ_c x[n,i,c] · y[n,j,c,d]", "(N, M, Cout)"),
    "vecsca": ("x[n,i,c] · y[n,j]", "(N, M, C)"),
    "scavec": ("x[n,i] · y[n,j,c]", "(N, M, C)"),
    "mat_t_vec": ("Σ_c x[n,i,c,d] · y[n,j,c]", "(N, M, Cout)"),
}

_DOC = """z[n,m] = Σ_{{k ∈ segment m}} s[t] · {formula},  t = gather_index[k].

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

    Raises:
        WeftError: inputs or tables that do not fit, with what to do.  Values of tables are checked
            on the CPU always, on a GPU under TORCHWEFT_CHECK=1.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|s x y|, K terms a row, u the dtype's unit round-off,
    u_acc that of float32 (float64 for float64).  Differentiable in input1, input2 and scale, to
    any order; bitwise repeatable; no host synchronisation once the tables' plan exists.
    Moves at least each input row that is named and the output once.
    """


def _scale_gather(op: str) -> ScaleGather:
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
        result = apply(
            op,
            input1,
            input2,
            scale,
            Tables(index1, index2, seg, gather_index, index_out),
            accumulate=out_accumulated,
            out_size=out_size,
            backend=backend,
        )
        if out is None:
            return result
        check_out(out, result)
        return out.copy_(result)

    formula, result = _FORMULAS[op]
    layout1, layout2 = LAYOUTS[op]
    doc = _DOC.format(formula=formula, result=result, layout1=layout1, layout2=layout2)
    return publish(function, f"indexed_{op}_scale_gather", doc)  # type: ignore[no-any-return]


def publish(function: Any, name: str, doc: str) -> Any:
    """A generated function under its public name, with its text and its `.explain`."""
    function.__name__ = function.__qualname__ = name
    # code of its own: torch.compile counts recompilations by code object
    function.__code__ = function.__code__.replace(co_name=name)
    function.__doc__ = doc
    function.explain = lambda *args, **kwargs: explain(function, *args, **kwargs)
    return function


_THIN_DOC = "z[n,m] = Σ_{{k ∈ segment m}} {formula}: `indexed_{op}_scale_gather` with {what}."

Thin = Callable[..., Tensor]


def _thin(op: str) -> tuple[Thin, Thin, Thin, Thin, Thin]:
    """The five forms with fewer arguments."""

    def indexed(
        input1: Tensor,
        input2: Tensor,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        return apply(op, input1, input2, None, Tables(index1, index2), backend=backend)

    def segment(
        input1: Tensor, input2: Tensor, seg: Tensor, *, backend: str | None = None
    ) -> Tensor:
        return apply(op, input1, input2, None, Tables(seg=seg), backend=backend)

    def indexed_segment(accumulate: bool) -> Thin:
        def function(
            input1: Tensor,
            input2: Tensor,
            index1: Tensor | None = None,
            index2: Tensor | None = None,
            seg: Tensor | None = None,
            *,
            backend: str | None = None,
        ) -> Tensor:
            tables = Tables(index1, index2, seg)
            return apply(op, input1, input2, None, tables, accumulate=accumulate, backend=backend)

        return function

    def indexed_scale_segment(
        input1: Tensor,
        input2: Tensor,
        scale: Tensor | None = None,
        index1: Tensor | None = None,
        index2: Tensor | None = None,
        seg: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        return apply(op, input1, input2, scale, Tables(index1, index2, seg), backend=backend)

    forms = {
        f"indexed_{op}": (indexed, "indices alone"),
        f"{op}_segment": (segment, "segments alone"),
        f"indexed_{op}_segment": (indexed_segment(False), "indices and segments"),
        f"indexed_{op}_scale_segment": (indexed_scale_segment, "scale, indices and segments"),
        f"accumulated_indexed_{op}_segment": (
            indexed_segment(True),
            "indices and segments, summed over n",
        ),
    }
    text = _THIN_DOC.replace("{formula}", _FORMULAS[op][0]).replace("{op}", op)
    return tuple(publish(f, name, text.format(what=what)) for name, (f, what) in forms.items())


indexed_mul_scale_gather = _scale_gather("mul")
indexed_outer_scale_gather = _scale_gather("outer")
indexed_inner_scale_gather = _scale_gather("inner")
indexed_vecmat_scale_gather = _scale_gather("vecmat")
indexed_vecsca_scale_gather = _scale_gather("vecsca")
indexed_scavec_scale_gather = _scale_gather("scavec")
indexed_mat_t_vec_scale_gather = _scale_gather("mat_t_vec")
(
    indexed_mul,
    mul_segment,
    indexed_mul_segment,
    indexed_mul_scale_segment,
    accumulated_indexed_mul_segment,
) = _thin("mul")
(
    indexed_outer,
    outer_segment,
    indexed_outer_segment,
    indexed_outer_scale_segment,
    accumulated_indexed_outer_segment,
) = _thin("outer")
(
    indexed_inner,
    inner_segment,
    indexed_inner_segment,
    indexed_inner_scale_segment,
    accumulated_indexed_inner_segment,
) = _thin("inner")
(
    indexed_vecmat,
    vecmat_segment,
    indexed_vecmat_segment,
    indexed_vecmat_scale_segment,
    accumulated_indexed_vecmat_segment,
) = _thin("vecmat")
(
    indexed_vecsca,
    vecsca_segment,
    indexed_vecsca_segment,
    indexed_vecsca_scale_segment,
    accumulated_indexed_vecsca_segment,
) = _thin("vecsca")
(
    indexed_scavec,
    scavec_segment,
    indexed_scavec_segment,
    indexed_scavec_scale_segment,
    accumulated_indexed_scavec_segment,
) = _thin("scavec")
(
    indexed_mat_t_vec,
    mat_t_vec_segment,
    indexed_mat_t_vec_segment,
    indexed_mat_t_vec_scale_segment,
    accumulated_indexed_mat_t_vec_segment,
) = _thin("mat_t_vec")
