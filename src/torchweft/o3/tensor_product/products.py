"""Tensor products of irreps, row by row or on the edges of a graph.

z[i_out] = Σ factor · weight · x[i_in1] ⊗ y[i_in2]      over the instructions into i_out

TensorProduct                 instructions are given; `tensor_product.instructions` lists the modes
FullyConnectedTensorProduct   every pair into every output that it couples to, weights mix all
ElementwiseTensorProduct      copy u of x with copy u of y, into all they couple to
FullTensorProduct             every copy of x with every copy of y, into all they couple to
TensorSquare                  x with itself: what symmetry leaves of both
TensorProductConv             Σ_{e: dst[e] = d} tp(x[src[e]], y[e], weight[e]) for each node d
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement
from typing import Any, Unpack

import torch
from torch import Tensor

from torchweft.core.operators.operands import same_kind
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.graph import Graph, graph_of
from torchweft.o3.irreps.irreps import (
    Irrep,
    Irreps,
    IrrepsLike,
    MulIr,
    broadcast_leads,
    check_rows,
    is_irrep,
)
from torchweft.o3.radial_linear.operator import RADIAL_PRECISIONS, radial_product
from torchweft.o3.tensor_product.instructions import IRREP_NORMALIZATIONS, checked_choice
from torchweft.o3.tensor_product.module import (
    ConvolutionOptions,
    InstructedModule,
    MixingOptions,
    ProductOptions,
)

__all__ = [
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "TensorProduct",
    "TensorProductConv",
    "TensorSquare",
    "kept_irreps",
    "paired",
]


class TensorProduct(InstructedModule):
    """z[i_out] = Σ factor · weight · x[i_in1] ⊗ y[i_in2] over the instructions, row by row.

    Args:
        irreps_in1: irreps of x (…, D1).
        irreps_in2: irreps of y (…, D2).
        irreps_out: irreps of z (…, D_out); items that no instruction reaches are zero.
        instructions: a list of (i_in1, i_in2, i_out, mode, has_weight), optionally with a
            path_weight, 1 by default; `mode` pairs copies: "uvw", "uvu", "uvv", "uuw", "uuu",
            "uvuv", "uvu<v" or "u<vw".
        in1_var: variance of each item of x; None: 1.
        in2_var: variance of each item of y; None: 1.
        out_var: wanted variance of each item of z; None: 1.
        irrep_normalization: "component" (None), "norm" or "none".
        path_normalization: "element" (None), "path" or "none".
        internal_weights: whether the module owns its weight; None: if it is shared.
        shared_weights: whether all rows have one weight (True, and None) or each row its own
            (False).
        normalization: e3nn's old name of irrep_normalization.
        compile_left_right: without effect: a call and `right` always exist.
        compile_right: without effect.
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`; numba computes channelwise modes only.

    Attributes:
        instructions: a list of `Instruction`, with factors in place of path weights.
        weight_numel: numbers in the flat weight of one row.
        weight: the parameter (weight_numel,) if the module owns it.
        output_mask: (D_out,), 1 where an instruction reaches the output, else 0.

    Raises:
        WeftError: instructions that do not fit the irreps; the text says which and why.

    Error: |z − z*| ≤ u|z*| + 4√K·2⁻²⁴·Σ|factor · C · x · y · weight|, K terms per number, u the
    unit round-off of the dtype; 2⁻⁵³ for float64; where torch.backends.cuda.matmul allows TF32,
    modes that mix copies 2⁻⁹ of the sum more.  Differentiable to any order; the same bits at every
    call.

    Cost: channelwise modes (uvu, uvv, uuu, uvuv) are one kernel that reads x, y and the weight and
    writes z once; uvw, uuw and u<vw add one matrix product for each item of the output.  3j symbols
    and factors are float64 on the host, whatever the dtype of the module.

    Source: names, normalisations and the order of weights are e3nn's,
    https://github.com/e3nn/e3nn; its checkpoints load.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> product = o3.TensorProduct("8x0e+8x1o", "1x1o", "8x1o", [(0, 0, 0, "uvu", True)])
        >>> product.weight_numel
        8
        >>> product(torch.randn(10, 32), torch.randn(10, 3)).shape
        torch.Size([10, 24])
    """

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None
    ) -> Tensor:
        """The product.

        Args:
            x: (…, D1); its leading dimensions, y's and those of own weights broadcast.
            y: (…, D2).
            weight: (weight_numel,), or (…, weight_numel) without shared_weights, or a list of one
                for each instruction that has weights; None: the module's.

        Returns:
            (…, D_out) in the inputs' dtype.
        """
        z = self._cached(x, y, weight)
        if z is not None:
            return z
        x, y, flat = self._checked(x, y, weight)
        own = [] if flat is None or self.shared_weights else [flat]
        batch = broadcast_leads([t.shape[:-1] for t in (x, y, *own)])
        x, y, *own = (_rows(t, batch) for t in (x, y, *own))
        flat = own[0] if own else flat
        if len(batch) == 1:
            return self._evaluated(x, y, flat)
        return self.recipe(x, y, flat).view(*batch, self.irreps_out.dim)

    def right(self, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """b with z = x @ b: the product with x left open.

        Args:
            y: (…, D2).
            weight: as in a call.

        Returns:
            (…, D1, D_out) in y's dtype.
        """
        flat = self.checked_weight(weight)
        if flat is not None and not self.shared_weights:
            flat = flat.unsqueeze(-2)
        unit = torch.eye(self.irreps_in1.dim, dtype=y.dtype, device=y.device)
        return TensorProduct.forward(self, unit, y.unsqueeze(-2), flat)


def _rows(x: Tensor, batch: torch.Size) -> Tensor:
    """(rows, D) of (…, D): one row for each of the broadcast dimensions."""
    if x.shape[:-1] == batch and len(batch) == 1:
        return x
    width = x.shape[-1]
    return x.expand(*batch, width).reshape(math.prod(batch), width)


Given = tuple[int, int, int, str, bool, float]


class FullyConnectedTensorProduct(TensorProduct):
    """z_w = Σ_uv weight_uvw x_u ⊗ y_v over every pair of items that couples to an item of z.

    Args:
        irreps_in1: irreps of x (…, D1).
        irreps_in2: irreps of y (…, D2).
        irreps_out: irreps of z (…, D_out).
        irrep_normalization: see TensorProduct.
        path_normalization: see TensorProduct.
        **options: further arguments of TensorProduct, by name.

    Raises:
        WeftError: irreps or options that do not fit.

    Error, cost, source and attributes: see TensorProduct, with the mode "uvw".

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> product = o3.FullyConnectedTensorProduct("8x0e+8x1o", "1x0e+1x1o", "8x0e+8x1o")
        >>> product
        FullyConnectedTensorProduct(8x0e+8x1o x 1x0e+1x1o -> 8x0e+8x1o | 256 paths | 256 weights)
        >>> product(torch.randn(10, 32), torch.randn(10, 4)).shape
        torch.Size([10, 32])
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        **options: Unpack[MixingOptions],
    ) -> None:
        first, second, out = Irreps(irreps_in1), Irreps(irreps_in2), Irreps(irreps_out)
        instructions = [
            (i, j, k, "uvw", True)
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            for k, c in enumerate(out)
            if c.ir in a.ir * b.ir
        ]
        super().__init__(
            first,
            second,
            out,
            instructions,
            irrep_normalization=irrep_normalization,
            path_normalization=path_normalization,
            **options,
        )


class ElementwiseTensorProduct(TensorProduct):
    """z_u = x_u ⊗ y_u, without weights; the output has every irrep that the pairs couple to.

    Args:
        irreps_in1: irreps of x, which are simplified.
        irreps_in2: irreps of y, which are simplified; as many irreps, copies counted.
        filter_ir_out: keep only these irreps of the output; None: all.
        irrep_normalization: see TensorProduct.
        **options: further arguments of TensorProduct, by name.

    Raises:
        ShapeError: x and y have different numbers of irreps.

    Error, cost, source and attributes: see TensorProduct, with the mode "uuu".

    Example:
        >>> from torchweft import o3
        >>> o3.ElementwiseTensorProduct("2x1o", "2x1o", ["0e", "1e"]).irreps_out
        2x0e+2x1e
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: IrrepsLike | None = None,
        irrep_normalization: str | None = None,
        **options: Unpack[ProductOptions],
    ) -> None:
        pairs = list(paired(Irreps(irreps_in1).simplify(), Irreps(irreps_in2).simplify()))
        keep = kept_irreps(filter_ir_out)
        out: list[MulIr] = []
        instructions = []
        for n, (a, b) in enumerate(pairs):
            for ir in a.ir * b.ir:
                if keep is None or ir in keep:
                    instructions.append((n, n, len(out), "uuu", False))
                    out.append(MulIr(a.mul, ir))
        first, second = ([pair[n] for pair in pairs] for n in range(2))
        super().__init__(
            first, second, out, instructions, irrep_normalization=irrep_normalization, **options
        )


class FullTensorProduct(TensorProduct):
    """z_uv = x_u ⊗ y_v, without weights; the output has every irrep, sorted.

    Args:
        irreps_in1: irreps of x, which are simplified.
        irreps_in2: irreps of y, which are simplified.
        filter_ir_out: keep only these irreps of the output; None: all.
        irrep_normalization: see TensorProduct.
        **options: further arguments of TensorProduct, by name.

    Raises:
        WeftError: irreps or options that do not fit.

    Error, cost, source and attributes: see TensorProduct, with the mode "uvuv".

    Example:
        >>> from torchweft import o3
        >>> o3.FullTensorProduct("2x0e+1o", "1o").irreps_out
        1x0e+2x1o+1x1e+1x2e
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: IrrepsLike | None = None,
        irrep_normalization: str | None = None,
        **options: Unpack[ProductOptions],
    ) -> None:
        first, second = Irreps(irreps_in1).simplify(), Irreps(irreps_in2).simplify()
        keep = kept_irreps(filter_ir_out)
        found = [
            ((i, j), MulIr(a.mul * b.mul, ir))
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            for ir in a.ir * b.ir
            if keep is None or ir in keep
        ]
        out, place, _ = Irreps([item for _, item in found]).sort()
        instructions = [(*pair, place[n], "uvuv", False) for n, (pair, _) in enumerate(found)]
        super().__init__(
            first, second, out, instructions, irrep_normalization=irrep_normalization, **options
        )


class TensorSquare(TensorProduct):
    """z = x ⊗ x, decomposed into irreps: all of them without weights, or irreps_out with weights.

    Of the product of a copy with itself the odd degrees vanish; of two copies u < v each pair is
    taken once.  For normal x the output has the variance 1 ("component"), or the norm 1 ("norm").

    Args:
        irreps_in: irreps of x (…, D), which are simplified.
        irreps_out: irreps of z, which are simplified; None: all irreps, sorted, without weights.
        filter_ir_out: without irreps_out, keep only these irreps; None: all.
        irrep_normalization: "component" (None), "norm" or "none".
        **options: further arguments of TensorProduct, by name.

    Raises:
        ShapeError: both irreps_out and filter_ir_out are given.

    Error, cost, source and attributes: see TensorProduct.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> square = o3.TensorSquare("1x1o")
        >>> square.irreps_out
        1x0e+1x2e
        >>> square(torch.randn(10, 3)).shape
        torch.Size([10, 6])
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike | None = None,
        filter_ir_out: IrrepsLike | None = None,
        irrep_normalization: str | None = None,
        **options: Unpack[ProductOptions],
    ) -> None:
        irreps = Irreps(irreps_in).simplify()
        normalization = checked_choice(
            "irrep_normalization", irrep_normalization, IRREP_NORMALIZATIONS
        )
        if irreps_out is None:
            out, instructions = _all_squares(irreps, kept_irreps(filter_ir_out), normalization)
        elif filter_ir_out is None:
            out = Irreps(irreps_out).simplify()
            instructions = list(_mixed_squares(irreps, out, normalization))
        else:
            raise ShapeError(
                "irreps_out and filter_ir_out are both given: the first is the output, the second "
                "chooses from all irreps of the product. Pass only one."
            )
        super().__init__(irreps, irreps, out, instructions, irrep_normalization="none", **options)
        self.irreps_in = irreps

    def __repr__(self) -> str:
        return super().__repr__().replace(f" x {self.irreps_in}", "", 1)

    def forward(  # type: ignore[override]  # one factor
        self, x: Tensor, weight: Tensor | Sequence[Tensor] | None = None
    ) -> Tensor:
        """The square of x.

        Args:
            x: (…, D).
            weight: see TensorProduct.

        Returns:
            (…, D_out) in the inputs' dtype.
        """
        return super().forward(x, x, weight)


def paired(first: Irreps, second: Irreps) -> Iterator[tuple[MulIr, MulIr]]:
    """The items of both, cut where either has another irrep: pairs of as many copies."""
    if first.num_irreps != second.num_irreps:
        raise ShapeError(
            f"irreps_in1 {first} has {first.num_irreps} irreps and irreps_in2 {second} has "
            f"{second.num_irreps}: copy u of one meets copy u of the other. Pass as many in both."
        )
    left, right = list(first), list(second)
    while left:
        a, b = left.pop(0), right.pop(0)
        count = min(a.mul, b.mul)
        if a.mul > count:
            left.insert(0, MulIr(a.mul - count, a.ir))
        if b.mul > count:
            right.insert(0, MulIr(b.mul - count, b.ir))
        yield MulIr(count, a.ir), MulIr(count, b.ir)


def kept_irreps(given: IrrepsLike | None) -> frozenset[Irrep] | None:
    """The irreps to keep, without multiplicities."""
    if given is None:
        return None
    items = Irreps(given) if isinstance(given, str) or is_irrep(given) else given
    found: list[Any] = [getattr(item, "ir", item) for item in items]
    return frozenset(map(Irrep, found))


_MODES_OF_ALL = {"uv": "uvuv", "u<v": "uvu<v", "uu": "uuu"}
_MODES_OF_MIXED = {"uv": "uvw", "u<v": "u<vw", "uu": "uuw"}
"""The mode of copies of two items, of pairs of copies of one, and of copies with themselves."""


def _all_squares(
    irreps: Irreps, keep: frozenset[Irrep] | None, normalization: str
) -> tuple[Irreps, list[Given]]:
    """Every irrep of x ⊗ x, sorted, and the instructions."""
    out: list[MulIr] = []
    raw: list[Given] = []
    for i, j in combinations_with_replacement(range(len(irreps)), 2):
        for ir in irreps[i].ir * irreps[j].ir:
            if keep is None or ir in keep:
                for copies, mul, weight in _square(irreps, i, j, ir, normalization):
                    raw.append((i, j, len(out), _MODES_OF_ALL[copies], False, weight))
                    out.append(MulIr(mul, ir))
    found, place, _ = Irreps(out).sort()
    return found, [(i, j, place[k], mode, flag, weight) for i, j, k, mode, flag, weight in raw]


def _mixed_squares(irreps: Irreps, out: Irreps, normalization: str) -> Iterator[Given]:
    """Instructions that mix every irrep of x ⊗ x into the outputs."""
    for i, j in combinations_with_replacement(range(len(irreps)), 2):
        for k, (_, ir) in enumerate(out):
            if ir in irreps[i].ir * irreps[j].ir:
                for copies, _, weight in _square(irreps, i, j, ir, normalization):
                    yield i, j, k, _MODES_OF_MIXED[copies], True, weight


def _square(
    irreps: Irreps, i: int, j: int, out: Irrep, normalization: str
) -> Iterator[tuple[str, int, float]]:
    """Which copies of items i ≤ j meet, the number of such pairs, and their path weight."""
    (mul, first), (mul2, second) = irreps[i], irreps[j]
    size = {"component": out.dim, "norm": first.dim * second.dim, "none": 1}[normalization]
    if i < j:
        yield "uv", mul * mul2, size
        return
    if mul > 1:
        yield "u<v", mul * (mul - 1) // 2, size
    if out.l % 2 == 0:
        yield "uu", mul, _own_size(first, out, normalization)


def _own_size(ir: Irrep, out: Irrep, normalization: str) -> float:
    """The path weight of a copy with itself: its components are not independent."""
    if normalization == "component":
        return out.dim / (ir.dim + 2) if out.l == 0 else out.dim / 2
    if normalization == "norm":
        return ir.dim if out.l == 0 else ir.dim * (ir.dim + 2) / 2
    return 1


class TensorProductConv(InstructedModule):
    """out[d] = Σ_{e: dst[e] = d} tp(x[src[e]], y[e], weight[e]), tp a TensorProduct.

    Args:
        irreps_in1: irreps of x (rows, D1), the features of the nodes.
        irreps_in2: irreps of y (E, D2), the features of the edges, such as the spherical harmonics
            of their directions.
        irreps_out: irreps of the result (num_nodes, D_out).
        instructions: see TensorProduct.
        precision: of float32 products with radial_weight on tensor cores: "tf32x3", as exact as
            float32, or "tf32", with the first 11 significant bits of factors.
        **options: further arguments of TensorProduct, by name.  Each edge has weights of its own
            unless shared_weights or internal_weights is True.

    Raises:
        WeftError: instructions that do not fit the irreps, or another precision.

    Error: that of TensorProduct, K terms per number counted over the edges of a node.  The order of
    the sum is fixed: the same bits at every call, without atomics.  Differentiable to any order.

    Cost: channelwise modes (uvu, uvv, uuu, uvuv) are one kernel, and no message is stored; uvw and
    uuw store what they mix: for each node if weights are shared, else for each edge.

    Source: e3nn's TensorProduct between a gather and a scatter,
    https://github.com/e3nn/e3nn; the fusion is docs/families/o3.md, "On a graph".

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> paths = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)]
        >>> conv = o3.TensorProductConv("8x0e+8x1o", "1x0e+1x1o", "8x0e+8x1o", paths)
        >>> src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 0])
        >>> x, y, weight = torch.randn(3, 32), torch.randn(3, 4), torch.randn(3, conv.weight_numel)
        >>> conv(x, y, weight, src, dst).shape
        torch.Size([3, 32])
    """

    shares = False

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[Sequence[Any]],
        *,
        precision: str = "tf32x3",
        **options: Unpack[ConvolutionOptions],
    ) -> None:
        if precision not in RADIAL_PRECISIONS:
            raise DTypeError(
                f"precision is {precision!r}: it must be one of {', '.join(RADIAL_PRECISIONS)}. "
                'Leave it out for "tf32x3", which is as exact as float32.'
            )
        super().__init__(irreps_in1, irreps_in2, irreps_out, instructions, **options)
        self.precision = precision

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | Sequence[Tensor] | None = None,
        src: Tensor | Graph | None = None,
        dst: Tensor | None = None,
        num_nodes: int | None = None,
        *,
        radial: Tensor | None = None,
        radial_weight: Tensor | None = None,
    ) -> Tensor:
        """The sum over edges: `conv(x, y, weight, src, dst)` or `conv(x, y, weight, graph)`.

        Args:
            x: (rows, D1), row src[e] for edge e.
            y: (E, D2).
            weight: (E, weight_numel), or (weight_numel,) with shared_weights; None: the module's,
                or radial @ radial_weight.
            src: (E,) int64 or int32, rows of x; or a Graph in place of src, dst and num_nodes.
            dst: (E,) int64 or int32, rows of the result, in any order; rows may repeat or be
                missing.
            num_nodes: number of rows of the result; None: as many as x has.
            radial: (E, H), in place of weight: weight = radial @ radial_weight.
            radial_weight: (H, weight_numel).

        Returns:
            (num_nodes, D_out) in the inputs' dtype, the same bits at every call.

        Raises:
            ShapeError: a tensor that does not fit the irreps, the edges or the weights.
            DTypeError: src or dst is missing, or dtypes that do not fit each other.

        Note:
            Where all modes are channelwise, radial @ radial_weight is not stored: at most the
            weights of one block of edges are in memory, in gradients too.  With other modes it is
            stored.
        """
        if not isinstance(src, Graph):
            check_rows("x", x, self.irreps_in1, self)
        graph = self._graph(x, src, dst, num_nodes)
        if radial is None and radial_weight is None:
            z = self._cached(x, y, weight, graph)
            if z is not None:
                return z
        else:
            check_rows("x", x, self.irreps_in1, self)
            check_rows("y", y, self.irreps_in2, self)
            radial, radial_weight = self._radial(weight, radial, radial_weight)
            direct, mixed, dense, *_ = self.recipe.parts
            if mixed is None and not dense and any(s.weighted for s in direct):
                self._check_edges(x, y, radial, graph, "radial")
                return self._fused(x, y, radial, radial_weight, graph)
            weight = radial @ radial_weight
        x, y, flat = self._checked(x, y, weight)
        self._check_edges(x, y, flat, graph)
        return self._evaluated(x, y, flat, graph)

    def _fused(
        self, x: Tensor, y: Tensor, radial: Tensor, radial_weight: Tensor, graph: Graph
    ) -> Tensor:
        """The convolution with weights radial @ radial_weight, which are not stored."""
        found = []
        for structure in self.recipe.parts.direct:
            if structure.weighted:
                given = structure, x, y, radial, radial_weight, graph
                z = radial_product(*given, precision=self.precision, backend=self.backend)
            else:
                z = channelwise_product(structure, x, y, None, graph, backend=self.backend)
            found.append(z)
        return functools.reduce(torch.add, found)

    def _graph(
        self, x: Tensor, src: Tensor | Graph | None, dst: Tensor | None, num_nodes: int | None
    ) -> Graph:
        if isinstance(src, Graph):
            if dst is not None or num_nodes is not None:
                raise ShapeError(
                    "a Graph was given with dst or num_nodes: it holds both. Pass "
                    "conv(x, y, weight, graph), or src and dst as tensors."
                )
            return src
        if src is None or dst is None:
            missing = "src" if src is None else "dst"
            raise DTypeError(
                f"{missing} is missing: each edge reads row src[e] and adds to row dst[e]. "
                "Pass both, or a Graph in place of src."
            )
        return graph_of(src, dst, x.shape[0] if num_nodes is None else num_nodes, x.shape[0])

    def _radial(
        self,
        weight: Tensor | Sequence[Tensor] | None,
        radial: Tensor | None,
        radial_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """radial and radial_weight, checked."""
        if weight is not None or radial is None or radial_weight is None or self.shared_weights:
            given = {"weight": weight, "radial": radial, "radial_weight": radial_weight}
            names = ", ".join(name for name, value in given.items() if value is not None)
            raise ShapeError(
                f"{names} were given with shared_weights={self.shared_weights}: the weights of "
                "edges are radial @ radial_weight, or weight. Pass radial and radial_weight, and "
                "no weight, to a module with shared_weights=False."
            )
        radial, radial_weight = same_kind(radial=radial, radial_weight=radial_weight)
        if radial.dim() != 2 or radial_weight.shape != (radial.shape[-1], self.weight_numel):
            raise ShapeError(
                f"radial is {tuple(radial.shape)} and radial_weight {tuple(radial_weight.shape)}: "
                f"they must be (E, H) and (H, {self.weight_numel}). Pass such tensors."
            )
        return radial, radial_weight

    def _check_edges(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        graph: Graph,
        name_of_weight: str = "weight",
    ) -> None:
        """Rows of x for sources, of y and own weights for edges."""
        for name, tensor, rows, what in (
            ("x", x, graph.num_sources, "sources"),
            ("y", y, graph.num_edges, "edges"),
            (name_of_weight, None if self.shared_weights else weight, graph.num_edges, "edges"),
        ):
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[0] != rows):
                raise ShapeError(
                    f"{name} is {tuple(tensor.shape)} but the graph has {rows} {what}: it must be "
                    f"({rows}, {tensor.shape[-1]}). Pass a row for each."
                )
