"""Operators that mix features: linear maps by grade, the layer, the fully connected product.

    z_j = x_j @ W[grade of j]                       linear: the blades of a grade are rows of a GEMM
    z = norm(gelu(x) ∘ gelu(linear(x)))             layer: gradients meet in a GEMM's accumulator
    z_j[m] = Σ_(p,n) W[p,n,m] · pair_(p,j)[n]       pair_(p,j) = Σ sign · x_i y_k over path p

On the GPU the pairs, one matrix product an out grade and the norm around them are fused, see
fully_connected.py; elsewhere, and for gradients of gradients, they are programs around torch's own
products.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices.source import Norm
from torchweft.clifford.programs.operator import forward, run
from torchweft.clifford.programs.programs import pairs
from torchweft.core.backend import choose
from torchweft.core.expressions.program import accumulator, mask
from torchweft.core.operators.operands import without_autocast
from torchweft.core.operators.operator import FusedOperator, Gradients, constant_when_compiling

__all__ = ["fully_connected", "fully_connected_layer", "layer", "linear", "weight_gradient"]

GEMM_TILE, GEMMS_PER_GPU = 64, 256
"""Rows and columns of a tile of a matrix product, and about how many of them fill a GPU."""

WORTH_TURNING = 2**33
"""Multiplications of a TF32 product, from which on it gains more than the turn of its matrices."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, signature: str) -> Tensor:
    """(B, rows, F_in), (n+1, F_in, F_out), (F_out,) or None → (B, rows, F_out)."""
    return _linear(x, weight, bias, signature)


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> Tensor:
    """The products, each written to its place."""
    x, z = x.contiguous(), x.new_empty((*x.shape[:-1], weight.shape[-1]))
    if choose(None, x.device.type) == "triton":
        from torchweft.clifford.matrices import launch

        if launch.serves_rows(x, weight):
            launch.rows(x, weight, bias, len(weight) - 1, z)
            return z
        if _pays_to_turn(x, weight):
            weight = launch.turned(weight)
    for pair in _grade_pairs(signature):
        rows, matrices, place = pair.rows(x), pair.matrices(weight), pair.rows(z)
        if pair.first or bias is None:
            torch.bmm(rows, matrices, out=place)
        elif x.dtype == accumulator(x.dtype):
            torch.bmm(rows, matrices, out=place)
            z[0].add_(bias)
        else:  # inside the product: rounded once
            on_scalar = x.new_zeros(len(rows), 1, len(bias))
            on_scalar[0] = bias
            torch.baddbmm(on_scalar, rows, matrices, out=place)
    return z


def add_input_gradient(total: Tensor, grad: Tensor, weight: Tensor, signature: str) -> None:
    """total_j += grad_j @ W[grade of j]ᵀ, in the accumulator of the matrix product."""
    for pair in _grade_pairs(signature):
        place = pair.rows(total)
        torch.baddbmm(place, pair.rows(grad), pair.matrices(weight).mT, out=place)


def weight_gradient(x: Tensor, grad: Tensor, signature: str) -> Tensor:
    """Σ over blades of a grade and rows of x_j ⊗ grad_j, a matrix a grade.

    A product for each blade and part of the rows, then the sums over them: few small products with
    long sums would leave a GPU idle.
    """
    parts = _parts(x, grad.shape[-1])
    left, right = (
        t.reshape(len(t) * parts, t.shape[1] // parts, t.shape[-1])
        for t in (x.contiguous(), grad.contiguous())
    )
    found = _wide_product(left.mT, right)
    sizes = _sizes(signature)
    if choose(None, x.device.type) == "triton":
        from torchweft.clifford.matrices.launch import sum_by_grade

        return sum_by_grade(found, len(sizes) - 1, parts, x.dtype)
    of_grade = found.split_with_sizes([size * parts for size in sizes])
    return torch.stack([part.sum(0) for part in of_grade]).to(x.dtype)


def _pays_to_turn(x: Tensor, weight: Tensor) -> bool:
    """Whether TF32's product gains more from turned matrices than it takes to turn them."""
    return (
        x.dtype == torch.float32
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
        and weight.is_contiguous()
        and x.numel() * weight.shape[-1] >= WORTH_TURNING
    )


def _parts(x: Tensor, outputs: int) -> int:
    """Equal parts of the rows: as many products as fill a GPU, none too short."""
    blades, rows, features = x.shape
    tiles = blades * -(-features // GEMM_TILE) * -(-outputs // GEMM_TILE)
    most = max(1, min(GEMMS_PER_GPU // tiles, rows // GEMM_TILE)) if tiles else 1
    return max(part for part in range(1, most + 1) if rows % part == 0)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, batched; that of 16-bit numbers in float32."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


class _GradePair(NamedTuple):
    """Grades g and n − g, or the middle one alone.

    Args:
        first, last: the grades.
        start: of the first one's blades.
        size: number of blades of each.
        distance: blades from the first one's to the last one's.
    """

    first: int
    last: int
    start: int
    size: int
    distance: int

    def rows(self, x: Tensor) -> Tensor:
        """(grades, blades · rows, F) of a contiguous (B, rows, F)."""
        _, rows, features = x.shape
        number = 1 + (self.last > self.first)
        shape = (number, self.size * rows, features)
        strides = (max(self.distance, 1) * rows * features, features, 1)
        return x.as_strided(shape, strides, x.storage_offset() + self.start * rows * features)

    def matrices(self, weight: Tensor) -> Tensor:
        """(grades, F_in, F_out)."""
        return weight[self.first : self.last + 1 : max(self.last - self.first, 1)]


@constant_when_compiling
def _sizes(signature: str) -> list[int]:
    """Number of blades of each grade."""
    return Algebra.from_signature(signature).sizes


@functools.cache
def _grade_pairs(signature: str) -> tuple[_GradePair, ...]:
    """The pairs of grades, from the outer ones to the middle."""
    sizes = _sizes(signature)
    starts, n = list(itertools.accumulate(sizes, initial=0)), len(sizes) - 1
    return tuple(
        _GradePair(first, n - first, starts[first], sizes[first], starts[n - first] - starts[first])
        for first in range(n // 2 + 1)
    )


def _linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> list[Tensor]:
    return [outputs(x, weight, bias, signature)]


def _linear_backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, _, signature = args
    return (
        outputs(grad, weight.mT, None, signature) if needed[0] else None,
        weight_gradient(x, grad, signature) if needed[1] else None,
        grad[0].sum(0) if needed[2] else None,
    )


def _linear_composition(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> Tensor:
    z = torch.cat(
        [
            part @ matrix
            for part, matrix in zip(x.split_with_sizes(_sizes(signature)), weight, strict=True)
        ]
    )
    return z if bias is None else torch.cat([z[:1] + bias, z[1:]])


def _linear_fake(x: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[-1]))]


_linear = FusedOperator(
    "clifford_linear",
    "Tensor x, Tensor weight, Tensor? bias, str signature",
    3,
    _linear_forward,
    _linear_backward,
    _linear_fake,
    _linear_composition,
)


def layer(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    *,
    signature: str,
    ending: str,
    backend: str,
) -> Tensor:
    """(B, rows, F) by matrices (n+1, F, F), bias (F,) and weight (F, P).

    `ending` are the words of the norm, "euclidean 0x…", or "" for none.
    """
    program, by_path = f"layer {signature} {ending}".rstrip(), weight.T.contiguous()
    return _layer(x, linear_weight, linear_bias.view(1, -1), by_path, signature, program, backend)


def _layer_forward(
    x: Tensor,
    linear_weight: Tensor,
    bias: Tensor,
    weight: Tensor,
    signature: str,
    program: str,
    backend: str,
) -> list[Tensor]:
    y = outputs(x, linear_weight, None, signature)
    return [*forward(program, backend, x, y, bias, weight), y]


def _layer_backward(
    args: Sequence[Any], saved: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, linear_weight, bias, weight, signature, program, backend = args
    (y,) = saved
    wanted = mask([needed[0], needed[0] or needed[1], needed[2], needed[3]])
    found = iter(forward(f"{program} | vjp {wanted} 1", backend, x, y, bias, weight, grad))
    gx, gy, g_bias, gw = (next(found) if flag == "1" else None for flag in wanted)
    if gx is not None and gy is not None:
        add_input_gradient(gx, gy, linear_weight, signature)
    g_linear = None if gy is None or not needed[1] else weight_gradient(x, gy, signature)
    return gx, g_linear, g_bias, gw


def _layer_composition(
    x: Tensor,
    linear_weight: Tensor,
    bias: Tensor,
    weight: Tensor,
    signature: str,
    program: str,
    backend: str,
) -> Tensor:
    y = linear(x, linear_weight, signature=signature)
    return run(program, backend, x, y, bias, weight)[0]


def _layer_fake(x: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]


_layer = FusedOperator(
    "clifford_layer",
    "Tensor x, Tensor linear_weight, Tensor bias, Tensor weight, str signature, "
    "str program, str backend",
    4,
    _layer_forward,
    _layer_backward,
    _layer_fake,
    _layer_composition,
)


def fully_connected(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    *,
    algebra: Algebra,
    backend: str,
    gated: bool,
    ending: str,
) -> Tensor:
    """The product of (B, rows, F_in) and (P, F_in, F_out).

    Args:
        x: left factors.
        y: right factors.
        weight: matrices, by path.
        algebra: that defines the product.
        backend: where the programs run.
        gated: whether x and y are gated first.
        ending: the words of the norm that follows, "euclidean 0x…"; "" for none.
    """
    options = (algebra.signature, gated, ending, backend)
    if backend != "triton":  # sums in float32: pairs and partial sums are not rounded to 16 bits
        left, right, matrices = (t.to(accumulator(x.dtype)) for t in (x, y, weight))
        with without_autocast(x):
            return _product_composition(left, right, matrices, *options).to(x.dtype)
    args = (x, y, weight, *options)
    return _normalised(*args) if ending else _plain(*args)


def _product_composition(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, ending: str, backend: str
) -> Tensor:
    (found,) = run(f"pairs {signature}{' gated' * gated}", backend, x, y)
    blocks, start = [], 0
    for paths, blades in _blocks(signature):
        stop = start + len(paths) * blades
        part = found[start:stop].view(len(paths), blades, *found.shape[1:])
        matrices = torch.stack([weight[p] for p in paths])
        blocks.append(torch.einsum("pjrn,pnm->jrm", part, matrices))
        start = stop
    z = torch.cat(blocks)
    return run(f"rms_norm {signature} {ending}", backend, z)[0] if ending else z


@constant_when_compiling
def _blocks(signature: str) -> list[tuple[list[int], int]]:
    """The paths and the number of blades of each out grade."""
    algebra = Algebra.from_signature(signature)
    return list(zip(pairs(algebra)[1], algebra.sizes, strict=True))


def _product_forward(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, ending: str, backend: str
) -> list[Tensor]:
    from torchweft.clifford.matrices import fully_connected as gpu

    algebra = Algebra.from_signature(signature)
    return gpu.forward(x, y, weight, algebra, gated, Norm.of_words(ending))


def _product_backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    from torchweft.clifford.matrices import fully_connected as gpu

    x, y, weight, signature, gated, ending, _ = args
    algebra, norm = Algebra.from_signature(signature), Norm.of_words(ending)
    return gpu.backward(x, y, weight, saved, grad, algebra, gated, norm, needed)


def _product_fake(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, ending: str, backend: str
) -> list[Tensor]:
    z = x.new_empty((*x.shape[:-1], weight.shape[-1]))
    if not ending:
        return [z]
    from torchweft.clifford.matrices.fully_connected import saved_shapes

    grades = Algebra.from_signature(signature).n + 1
    kept = (x.new_empty(shape, dtype=dtype) for shape, dtype in saved_shapes(x, weight, grades))
    return [z, *kept]


_plain, _normalised = (
    FusedOperator(
        name,
        "Tensor x, Tensor y, Tensor weight, str signature, bool gated, str ending, str backend",
        3,
        _product_forward,
        _product_backward,
        _product_fake,
        _product_composition,
        keeps_result,
    )
    for name, keeps_result in (
        ("clifford_fully_connected", False),
        ("clifford_fully_connected_norm", True),
    )
)


def fully_connected_layer(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    *,
    algebra: Algebra,
    ending: str,
    backend: str,
) -> Tensor:
    """`layer` with the fully connected product: weight (P, F, F)."""
    if backend == "triton":
        return _connected(x, linear_weight, linear_bias, weight, algebra.signature, ending, backend)
    # a view of its own: the order in which autograd adds the gradients of x stays the same
    y = linear(x.movedim(0, 0), linear_weight, linear_bias, signature=algebra.signature)
    return fully_connected(
        x, y, weight, algebra=algebra, backend=backend, gated=True, ending=ending
    )


def _connected_forward(
    x: Tensor, linear_weight: Tensor, bias: Tensor, weight: Tensor, signature: str, *ending: str
) -> list[Tensor]:
    y = outputs(x, linear_weight, bias, signature)
    return [*_product_forward(x, y, weight, signature, True, *ending), y]


def _connected_backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, linear_weight, _, weight, signature, *ending = args
    *kept, y = saved
    of_x, of_linear, of_bias, of_weight = needed
    gx, gy, gw = _product_backward(
        (x, y, weight, signature, True, *ending), kept, grad, (of_x, any(needed[:3]), of_weight)
    )
    if gx is not None and gy is not None:
        add_input_gradient(gx, gy, linear_weight, signature)
    return (
        gx,
        weight_gradient(x, gy, signature) if gy is not None and of_linear else None,
        gy[0].sum(0) if gy is not None and of_bias else None,
        gw,
    )


def _connected_composition(
    x: Tensor, linear_weight: Tensor, bias: Tensor, weight: Tensor, signature: str, *ending: str
) -> Tensor:
    y = linear(x.movedim(0, 0), linear_weight, bias, signature=signature)
    return _product_composition(x, y, weight, signature, True, *ending)


def _connected_fake(
    x: Tensor, linear_weight: Tensor, bias: Tensor, weight: Tensor, signature: str, *ending: str
) -> list[Tensor]:
    y = x.new_empty(x.shape)
    return [*_product_fake(x, y, weight, signature, True, *ending), y]


_connected = FusedOperator(
    "clifford_fully_connected_layer",
    "Tensor x, Tensor linear_weight, Tensor bias, Tensor weight, str signature, "
    "str ending, str backend",
    4,
    _connected_forward,
    _connected_backward,
    _connected_fake,
    _connected_composition,
    keeps_result=True,
)
