"""The docstrings of the seven functions of each product, from what the functions differ in."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Sequence

from torchweft.products.forms import LAYOUTS

__all__ = ["docstring"]

_FORMULAS = {
    "mul": ("x[n,i,c] · y[n,j,c]", ("C",)),
    "outer": ("x[n,i,c] · y[n,j,d]", ("C1", "C2")),
    "inner": ("Σ_c x[n,i,c] · y[n,j,c]", ()),
    "vecmat": ("Σ_c x[n,i,c] · y[n,j,c,d]", ("Cout",)),
    "vecsca": ("x[n,i,c] · y[n,j]", ("C",)),
    "scavec": ("x[n,i] · y[n,j,c]", ("C",)),
    "mat_t_vec": ("Σ_c x[n,i,c,d] · y[n,j,c]", ("Cout",)),
}
"""What is summed, and the dimensions of a row of the result."""

_SUMS = {
    "indexed_op_scale_gather": "z[n,m] = Σ_{{k ∈ segment m}} scale[t] · {},  t = gather_index[k]",
    "indexed_op": "z[n,t] = {}",
    "indexed_op_scale_segment": "z[n,m] = Σ_{{t ∈ segment m}} scale[t] · {}",
    "op_segment": "z[n,m] = Σ_{{t ∈ segment m}} {}",
    "indexed_op_segment": "z[n,m] = Σ_{{t ∈ segment m}} {}",
    "accumulated_indexed_op_segment": "z[m] = Σ_n Σ_{{t ∈ segment m}} {}",
    "sparse_op": "z[n,m] = Σ_{{t ∈ terms of m}} scale[t] · {},  over the terms of an info",
}
"""The sum of each function, whose name has "op" for that of the product."""

_ARGUMENTS = {
    "input1": "{layout1}, float64, float32, bfloat16 or float16; without N it is shared over N.",
    "input2": "{layout2}, in the dtype of input1; without N it is shared over N.",
    "scale": "(T,) in the inputs' dtype or in the one sums are formed in; None is 1.",
    "index1": "(T,) rows of input1, int32 or int64; None is the identity.",
    "index2": "(T,) rows of input2, int32 or int64; None is the identity.",
    "seg": "(M+1,) bounds, not decreasing, int32 or int64: row m sums the terms seg[m] .. "
    "seg[m+1]-1.{unsegmented}",
    "gather_index": "entry k of a segment stands for term gather_index[k]; repeats are allowed; "
    "needs seg.",
    "index_out": "the output row of each segment (or term); equal ones add.",
    "info_fwd": "the terms, as `sparse_product_info` gives them; its scale is cast to the dtype "
    "that sums are formed in.",
    "info_bwd1": "the terms of the gradient of input1, as `sparse_product_infos` gives them. The "
    "gradient is computed from info_fwd; this one must agree with it in size.",
    "info_bwd2": "likewise for input2.",
    "out": "a tensor to write the result into; not together with gradients.",
    "out_accumulated": "whether to sum over n as well; the result then has no N.",
    "accumulated": "whether to sum over n as well; the result then has no N.",
    "out_size": "number of output rows M; rows that nothing reaches are zero.",
    "backend": '"triton", "numba", "torch", or None for the fastest that can serve.',
}

_ROWS = {
    "mul": "both inputs may also be numbers, (rows,), or have several dimensions, (N, rows, ...), "
    "of one shape, which those of the result have too",
    "inner": "both inputs may also be numbers, (rows,), or have several dimensions, "
    "(N, rows, ...), of one shape, all of which the sum is over",
    "vecsca": "input1 may also be numbers, (rows,), or have several dimensions, (N, rows, ...); "
    "those of the result have their shape",
    "scavec": "input2 may also be numbers, (rows,), or have several dimensions, (N, rows, ...); "
    "those of the result have their shape",
}

_END = """
Raises:
    WeftError: inputs or tables that do not fit, with what to do. Values of tables are checked on
        the CPU always, on a GPU under TORCHWEFT_CHECK=1.

Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|scale x y|, K terms a row, u the dtype's unit round-off, u_acc
that of float32 (float64 for float64).

Cost: each input row that is named is read, and the output written, once; the plan of the tables is
built at the first call and cached.

Source: the sum behind e3nn's tensor products, message passing and segment operations; see
docs/families/products.md.
"""

_SIZES = {"N": 4, "M": 2, "T": 4, "rows": 3, "C": 2, "C1": 2, "C2": 5, "Cin": 2, "Cout": 5}
"""Of the examples."""

_INDICES = ">>> index1, index2 = torch.tensor([0, 2, 2, 1]), torch.tensor([1, 1, 0, 2])"
_SEGMENTS = ">>> seg = torch.tensor([0, 1, 4])  # term 0 into row 0, terms 1, 2 and 3 into row 1"

_CALLS = {
    "indexed_op_scale_gather": (
        "x, y, scale, index1, index2, seg, gather_index",
        (
            _INDICES,
            ">>> scale, gather_index = torch.randn(4), torch.tensor([3, 0, 0, 2])",
            ">>> seg = torch.tensor([0, 1, 4])  # term 3 into row 0, terms 0, 0 and 2 into row 1",
        ),
    ),
    "indexed_op": ("x, y, index1, index2", (_INDICES,)),
    "indexed_op_scale_segment": (
        "x, y, torch.randn(4), index1, index2, seg",
        (_INDICES, _SEGMENTS),
    ),
    "op_segment": (
        "x, y, seg",
        (">>> seg = torch.tensor([0, 1, 3])  # term 0 into row 0, terms 1 and 2 into row 1",),
    ),
    "indexed_op_segment": ("x, y, index1, index2, seg", (_INDICES, _SEGMENTS)),
    "accumulated_indexed_op_segment": ("x, y, index1, index2, seg", (_INDICES, _SEGMENTS)),
    "sparse_op": (
        "x, y, info",
        (">>> info = products.sparse_product_info([0, 2, 2, 1], [1, 1, 0, 2], [0, 1, 1, 1])",),
    ),
}
"""The arguments of each function's example, and the lines before its call."""


def docstring(form: str, op: str, signature: inspect.Signature) -> str:
    """The docstring of the function `form` of a product `op`."""
    formula, channels = _FORMULAS[op]
    layout1, layout2 = LAYOUTS[op]
    unsegmented = "" if form == "op_segment" else " None: every term is a row of its own."
    words = {"layout1": layout1, "layout2": layout2, "unsegmented": unsegmented}
    indices = "i = j = t" if form == "op_segment" else "i = index1[t] and j = index2[t]"
    batch = () if form.startswith("accumulated") else ("N",)
    result = (*batch, "T" if form == "indexed_op" else "M", *channels)
    return "\n".join(
        [
            f"{_SUMS[form].format(formula)}.",
            "",
            f"Here {indices}; x is input1 and y is input2.",
            "",
            "Args:",
            *(_filled(f"{p}: {_ARGUMENTS[p].format(**words)}", 8) for p in signature.parameters),
            "",
            "Returns:",
            _filled(_returned(form, op, result), 4),
            _END,
            "Example:",
            *_example(form, op, result),
        ]
    )


def _returned(form: str, op: str, result: tuple[str, ...]) -> str:
    shape = f"({', '.join(result)}{',' * (len(result) == 1)})"
    shared = "; without N where N is summed over or both inputs are shared" * (result[0] == "N")
    scale = " and in the scale" if "scale[t]" in _SUMS[form] else ""
    ranks = f" Rows of {_ROWS[op]}." if op in _ROWS else ""
    return (
        f"{shape} in the inputs' dtype{shared}. Differentiable to any order in the inputs{scale}; "
        f"the same bits at every call.{ranks}"
    )


def _example(form: str, op: str, result: tuple[str, ...]) -> list[str]:
    arguments, before = _CALLS[form]
    inputs = (layout.strip("()").split(", ") for layout in LAYOUTS[op])
    x, y = (f"torch.randn({_sizes(letters)})" for letters in inputs)
    lines = [
        ">>> import torch",
        ">>> from torchweft import products",
        f">>> x, y = {x}, {y}  # {' and '.join(LAYOUTS[op])}",
        *before,
        f">>> products.{form.replace('op', op)}({arguments}).shape",
        f"torch.Size([{_sizes(result)}])",
    ]
    return [f"    {line}" for line in lines]


def _sizes(letters: Sequence[str]) -> str:
    return ", ".join(str(_SIZES[letter]) for letter in letters)


@functools.cache  # most texts are those of several functions
def _filled(text: str, hanging: int) -> str:
    return textwrap.fill(text, 96, initial_indent="    ", subsequent_indent=" " * hanging)
