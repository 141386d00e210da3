"""Linear maps between irreps: a matrix for each pair of items that are the same irrep; identity.

z[o, w] = Σ_{(i, o)} factor Σ_u weight_uw x[i, u]  (+ bias_w for 0e)

One weight serves all rows, or each element has a weight, or each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.operator import compiling
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import (
    Irreps,
    IrrepsLike,
    MulIr,
    as_block,
    broadcast_leads,
    check_rows,
    parts_of,
    side_by_side,
    steps,
)
from torchweft.o3.mixing.blocks import CopyBlock as Block
from torchweft.o3.mixing.blocks import MatrixPath as Path
from torchweft.o3.mixing.blocks import Mixing
from torchweft.o3.mixing.operator import mix, rows_of_elements, serves_mix
from torchweft.o3.tensor_product.instructions import check_item, checked_choice
from torchweft.o3.tensor_product.module import RowLayer, WeightedModule

__all__ = ["Identity", "Linear", "LinearInstruction", "linear_mixing"]


class LinearInstruction(NamedTuple):
    """From item i_in to item i_out; i_in is -1 for a bias, which is no part of `weight`."""

    i_in: int
    i_out: int
    path_shape: tuple[int, ...]
    path_weight: float

    @property
    def has_weight(self) -> bool:
        """Whether it is a matrix, not a bias."""
        return self.i_in >= 0


class Linear(WeightedModule):
    """z[o, w] = Σ_{(i, o)} factor Σ_u weight_uw x[i, u] (+ bias_w): equivariant under O(3).

    Copies of equal irreps are mixed.  The factor is 1/√(Σ copies of the items into the output)
    ("element"), or 1/√(the item's own copies times the number of such items) ("path").

    Args:
        irreps_in: irreps of x (…, D).
        irreps_out: irreps of z (…, D_out); items without an instruction are zero.
        f_in: x is (…, f_in, D) and the weight (f_in, f_out, weight_numel): every feature has its
            own, and the factor counts f_in times the copies.  None: neither has that dimension.
        f_out: z is (…, f_out, D_out); given together with f_in.
        num_elements: number of elements with a matrix of their own; the weight is (num_elements,
            weight_numel), and a call takes the element of each row of x.  None: one matrix.
        internal_weights: whether the module owns weight and bias; None: if they are shared.
        shared_weights: whether all rows have one weight (True, and None) or each row its own
            (False).
        instructions: (i_in, i_out) of items to connect; None: all that are the same irrep.
        biases: whether 0e items have a bias: one flag for all, or one for each item.
        path_normalization: "element" or "path".
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`; "numba" cannot serve, "triton" neither features nor shared
            weights in float64.

    Attributes:
        weight: the parameter, normal with variance 1 at first.
        bias: the parameter (bias_numel,), zeros at first.
        weight_numel, bias_numel: numbers in each.

    Raises:
        WeftError: instructions or biases that do not fit the irreps.

    Error: |z − z*| ≤ u|z*| + 4√K·2⁻²⁴·Σ|factor · x · weight|, K terms per number, u the unit
    round-off of the dtype; 2⁻⁵³ for float64; where torch.backends.cuda.matmul allows TF32, 2⁻⁹ of
    the sum more.  Differentiable to any order.

    Cost: one matrix product for each item of the output.

    Source: names, normalisations and the order of weights are e3nn's,
    https://github.com/e3nn/e3nn; its checkpoints load.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> linear = o3.Linear("8x0e+4x1o", "16x0e+4x1o")
        >>> linear
        Linear(8x0e+4x1o -> 16x0e+4x1o | 144 weights)
        >>> linear(torch.randn(10, 20)).shape
        torch.Size([10, 28])
    """

    _torch_only = False
    instructions: Sequence[LinearInstruction]
    bias: Tensor

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike,
        *,
        f_in: int | None = None,
        f_out: int | None = None,
        num_elements: int | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        instructions: Iterable[tuple[int, int]] | None = None,
        biases: bool | Sequence[bool] = False,
        path_normalization: str = "element",
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        if (f_in is None) != (f_out is None):
            raise ShapeError(
                f"f_in is {f_in} and f_out is {f_out}: both or neither must be given. Pass both, "
                "or none."
            )
        if num_elements is not None:
            _check_alone(num_elements, f_in, shared_weights, biases)
        irreps, out = Irreps(irreps_in), Irreps(irreps_out)
        paths = _paths(irreps, out, instructions)
        normalization = checked_choice(
            "path_normalization", path_normalization, ("element", "path")
        )
        found = [
            *_normalised(paths, irreps, out, f_in or 1, normalization),
            *(LinearInstruction(-1, k, (out[k].mul,), 1.0) for k in _biased(biases, out)),
        ]
        features = () if f_in is None or f_out is None else (f_in, f_out)
        elements = () if num_elements is None else (num_elements,)
        dims = features or elements
        super().__init__(found, out, internal_weights, shared_weights, layout, backend, dims)
        self.irreps_in, self.features, self.num_elements = irreps, features, num_elements
        self._calls: CallCache[bool] = CallCache()  # whether kernels serve a call by one operator
        self.mixing = None if features else linear_mixing(found, self.offsets, irreps, out, layout)
        self._into = [
            [
                n
                for n, i in enumerate(found)
                if i.i_out == k and i.i_in >= 0 and 0 not in i.path_shape
            ]
            for k in range(len(out))
        ]
        biased = [i.i_out for i in found if i.i_in < 0]
        *starts, self.bias_numel = accumulate((out[k].mul for k in biased), initial=0)
        self._bias_starts = dict(zip(biased, starts, strict=True))
        owned = self.shared_weights if internal_weights is None else internal_weights
        if owned and self.bias_numel > 0:
            self.bias = nn.Parameter(torch.zeros(*features[1:], self.bias_numel))
        else:  # an empty tensor, as e3nn's
            self.register_buffer("bias", torch.empty(0), persistent=False)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | Sequence[Tensor] | None = None,
        bias: Tensor | None = None,
        *,
        element: Tensor | None = None,
    ) -> Tensor:
        """The linear map.

        Args:
            x: (…, D), or (…, f_in, D); with num_elements (N, D).  Where no path reads x, D may be
                0, as in e3nn.
            weight: (weight_numel,), or (…, weight_numel) without shared_weights; with f_in, f_out
                or num_elements in front of weight_numel; None: the module's.
            bias: (bias_numel,), or (…, bias_numel); with f_out in front; None: the module's.
            element: (N,) integers below num_elements, in any order.  The rows of each element are
                sorted once for a tensor and cached.

        Returns:
            (…, D_out), or (…, f_out, D_out), in the inputs' dtype.

        Raises:
            ShapeError: a tensor that does not fit the irreps or the weights.
            DTypeError: dtypes that do not fit each other.
        """
        maybe_cached = bias is None and not compiling() and bool(self._calls)
        z = self._cached(x, weight, element) if maybe_cached else None
        if z is not None:
            return z
        if not self.weight_numel and isinstance(x, Tensor) and x.shape[-1:] == (0,):
            x = x.new_zeros(*x.shape[:-1], self.irreps_in.dim)
        check_rows("x", x, self.irreps_in, self)
        self._check_element(x, element)
        flat = self.checked_weight(weight)
        shift = self._checked_bias(bias)
        x, *given = same_kind(x=x, weight=flat, bias=shift)
        flat = None if flat is None else given[0]
        shift = None if shift is None else given[-1]
        if element is not None:
            if flat is None:
                return x.new_zeros(x.shape[0], self.irreps_out.dim)
            kernels = serves_mix(self.mixing, x, True, self.backend)
            self._cache((x, flat, element), kernels)
            return self._by_operator(x, flat, element, kernels)
        if self.features and (x.dim() < 2 or x.shape[-2] != self.features[0]):
            f_in = self.features[0]
            raise ShapeError(
                f"x is {tuple(x.shape)} but f_in is {f_in}: it must be "
                f"(…, {f_in}, {self.irreps_in.dim}). Put the features before D."
            )
        if flat is None or not serves_mix(self.mixing, x, self.shared_weights, self.backend):
            return self._by_matrices(x, flat, shift)
        if x.dim() == flat.dim() + 1 == 2 and shift is None:
            self._cache((x, flat), True)
        return self._mixed(x, flat, shift)

    def _cached(self, x: Tensor, weight: Any, element: Tensor | None) -> Tensor | None:
        """The result of a cached call by one operator; None: the call is not cached."""
        if weight is None:
            weight = self.weight
        known = signature((x, weight) if element is None else (x, weight, element))
        kernels = None if known is None else self._calls.get(known)
        return None if kernels is None else self._by_operator(x, weight, element, kernels)

    def _cache(self, given: Sequence[Tensor], kernels: bool) -> None:
        known = signature(given)
        if known is not None:
            self._calls.keep(known, kernels)

    def _by_operator(
        self, x: Tensor, weight: Tensor, element: Tensor | None, kernels: bool
    ) -> Tensor:
        """(N, D_out): rows by one matrix, or each row by the matrices of its element."""
        assert self.mixing is not None
        if element is None:
            return mix(self.mixing, x, weight)
        assert self.num_elements is not None
        rows = rows_of_elements(element, self.num_elements)
        return mix(self.mixing, x, weight, rows, kernels=kernels)

    def _check_element(self, x: Tensor, element: Tensor | None) -> None:
        if (element is None) != (self.num_elements is None):
            given = "missing" if element is None else "given"
            raise ShapeError(
                f"element is {given} but num_elements is {self.num_elements}: a Linear takes the "
                "elements of rows if it has a matrix for each. Pass element=, or build the Linear "
                "with num_elements."
            )
        if element is None:
            return
        if element.dtype not in (torch.int64, torch.int32):
            raise DTypeError(
                f"element is {element.dtype}: it must be int64 or int32. Pass element.long(), or "
                "one_hot.argmax(1)."
            )
        if x.dim() != 2 or element.shape != x.shape[:1]:
            raise ShapeError(
                f"x is {tuple(x.shape)} and element {tuple(element.shape)}: they must be "
                f"(N, {self.irreps_in.dim}) and (N,). Flatten both."
            )

    def _mixed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map by one operator, without features."""
        assert self.mixing is not None
        lead = x.shape[:-1]
        if not self.shared_weights:
            lead = broadcast_leads([lead, weight.shape[:-1]])
            weight = weight.expand(*lead, weight.shape[-1]).flatten(0, -2)
        rows = x.expand(*lead, x.shape[-1]).reshape(math.prod(lead), x.shape[-1])
        z = mix(self.mixing, rows, weight).view(*lead, self.mixing.width("z"))
        if bias is None:
            return z
        shifts = [
            self._bias_of(k, bias)
            if k in self._bias_starts
            else bias.new_zeros(*bias.shape[:-1], item.dim)
            for k, item in enumerate(self.irreps_out)
        ]
        return z + side_by_side(shifts, -1)

    def _by_matrices(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The map, for each item of the output one product of matrices."""
        lead, f_out = x.shape[: -2 if self.features else -1], self.features[1:]
        if not self.shared_weights and weight is not None:
            lead = broadcast_leads([lead, weight.shape[: -1 - len(self.features)]])
        parts = parts_of(x, [item.dim for item in self.irreps_in])
        matrices, found = self._matrices(weight), []
        for k, (mul, ir) in enumerate(self.irreps_out):
            if self._into[k]:
                items = [self.instructions[n].i_in for n in self._into[k]]
                rows = [self._rows(parts[i], self.irreps_in[i]) for i in items]
                together, matrix = self._factors(k, rows, matrices)
                if self.shared_weights and not self.features:
                    together = together.reshape(-1, together.shape[-1])
                z = torch.matmul(together, matrix)
                if self.features:
                    z = z.view(-1, ir.dim, *f_out, mul).movedim(-2, 1)
                if ir.dim > 1 and self.layout == "mul_ir":
                    z = z.reshape(-1, ir.dim, mul).mT
                z = z.reshape(*lead, *f_out, mul * ir.dim)
            else:
                z = x.new_zeros(*lead, *f_out, mul * ir.dim)
            if bias is not None and k in self._bias_starts:
                z = z + self._bias_of(k, bias)
            found.append(z)
        return side_by_side(found, -1) if found else x.new_zeros(*lead, *f_out, 0)

    def _rows(self, part: Tensor, item: MulIr) -> Tensor:
        """An item of x: (…, copies), with 2l+1 rows for each of x's; all in one if mul_ir."""
        mul, ir = item
        if self.features or not self.shared_weights:
            block = as_block(part, item, self.layout)
            rows = (block.flatten(-3, -2) if self.features else block).mT
            return rows.flatten(0, -2) if self.shared_weights else rows
        if ir.dim == 1:
            return part.reshape(-1, mul)
        if self.layout == "mul_ir":
            return part.reshape(-1, mul, ir.dim).mT.reshape(-1, mul)
        # a view: side by side with others it is copied
        return part.view(*part.shape[:-1], ir.dim, mul)

    def _factors(self, k: int, rows: list[Tensor], matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The rows that go into one item of the output, side by side, and their matrix.

        The rows, not the matrix, are multiplied by the factor of the paths: where this time
        matters they are few.  The order does not depend on the number of rows, which compiled
        code does not know, so that bits do not either.
        """
        chosen = [matrices[n] for n in self._into[k]]
        factor, *others = (self.instructions[n].path_weight for n in self._into[k])
        if any(other != factor for other in others):
            factors = (factor, *others)
            rows = [row * f for row, f in zip(rows, factors, strict=True)]
            factor = 1.0
        together, matrix = side_by_side(rows, -1), side_by_side(chosen, -2)
        return together if factor == 1 else together * factor, matrix

    def _matrices(self, weight: Tensor | None) -> list[Tensor]:
        """(…, copies in, copies out) of the instructions, copies of every feature."""
        found = [view for view in self._views(weight) if view is not None]
        if not self.features:
            return found
        return [m.transpose(-3, -2).flatten(-2).flatten(-3, -2) for m in found]

    def _bias_of(self, k: int, bias: Tensor) -> Tensor:
        """(…, mul): the bias of an item of the output."""
        return bias.narrow(-1, self._bias_starts[k], self.irreps_out[k].mul)

    def _checked_bias(self, bias: Tensor | None) -> Tensor | None:
        if bias is None:
            if self.bias_numel and not self.bias.numel():
                raise ShapeError(
                    f"bias is missing: this Linear takes (…, {self.bias_numel}). Pass it, or build "
                    "the module with internal_weights=True."
                )
            return self.bias if self.bias_numel else None
        if bias.dim() == 0 or bias.shape[-1] != self.bias_numel:
            raise ShapeError(
                f"bias is {tuple(bias.shape)}: this Linear takes (…, {self.bias_numel}). Pass "
                "such a bias, or other biases= at construction."
            )
        return bias


def _check_alone(
    num_elements: int, f_in: int | None, shared_weights: bool | None, biases: bool | Sequence[bool]
) -> None:
    """Raise ShapeError if matrices by element are combined with another choice of weights."""
    if num_elements < 1 or f_in is not None or shared_weights is False or biases not in (False, ()):
        raise ShapeError(
            f"num_elements={num_elements} was given with f_in={f_in}, "
            f"shared_weights={shared_weights} and biases={biases}: 1 or more elements have "
            "shared weights, no features and no biases. Leave one of them out."
        )


def _paths(
    irreps: Irreps, out: Irreps, given: Iterable[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    if given is None:
        return [
            (i, k)
            for i, item in enumerate(irreps)
            for k, other in enumerate(out)
            if item.ir == other.ir
        ]
    paths = [(int(i), int(k)) for i, k in given]
    for i, k in paths:
        for index, name, items in ((i, "irreps_in", irreps), (k, "irreps_out", out)):
            check_item((i, k), index, name, items)
        if irreps[i].ir != out[k].ir:
            raise ShapeError(
                f"instruction ({i}, {k}) connects {irreps[i]} with {out[k]}: a linear map between "
                "different irreps that is equivariant is zero. Connect items of one irrep."
            )
    return paths


def linear_mixing(
    instructions: Sequence[LinearInstruction],
    offsets: Sequence[int],
    irreps: Irreps,
    out: Irreps,
    layout: str,
) -> Mixing:
    """The matrices of instructions, which begin at these numbers of a row of weights."""

    def blocks(items: Irreps) -> tuple[Block, ...]:
        return tuple(
            Block(place.start, item.ir.dim, *steps(item, layout), item.mul)
            for place, item in zip(items.slices(), items, strict=True)
        )

    matrices = [
        (n, i) for n, i in enumerate(instructions) if i.has_weight and 0 not in i.path_shape
    ]
    paths = tuple(Path(i.i_in, i.i_out, offsets[n], i.path_weight) for n, i in matrices)
    weights = sum(math.prod(i.path_shape) for _, i in matrices)
    return Mixing((irreps.dim, out.dim, weights), blocks(irreps), blocks(out), paths)


def _normalised(
    paths: list[tuple[int, int]], irreps: Irreps, out: Irreps, f_in: int, normalization: str
) -> Iterator[LinearInstruction]:
    for i, k in paths:
        beside = [irreps[j].mul for j, other in paths if other == k]
        terms = sum(beside) if normalization == "element" else irreps[i].mul * len(beside)
        factor = 1 / math.sqrt(f_in * terms) if terms else 1.0
        yield LinearInstruction(i, k, (irreps[i].mul, out[k].mul), factor)


def _biased(biases: bool | Sequence[bool] | None, out: Irreps) -> list[int]:
    """The items of the output that have a bias."""
    if biases is None or isinstance(biases, bool):
        return [k for k, item in enumerate(out) if biases and item.ir.is_scalar()]
    if len(biases) != len(out):
        raise ShapeError(
            f"biases has {len(biases)} flags but irreps_out {out} has {len(out)} items. Pass one "
            "flag an item, or True for all 0e."
        )
    for flag, item in zip(biases, out, strict=True):
        if flag and not item.ir.is_scalar():
            raise ShapeError(
                f"biases has True for {item}: only 0e may have a bias, of another irrep the result "
                "would not be equivariant. Pass False there, or biases=True for all 0e."
            )
    return [k for k, flag in enumerate(biases) if flag]


class Identity(RowLayer):
    """z = x: the layer that e3nn builds where nothing changes.

    Args:
        irreps_in: irreps of x, which are simplified.
        irreps_out: irreps of z, the same.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: the irreps differ.
        BackendError: another backend is requested.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.Identity("2x0e", "2x0e")(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """

    _e3nn_parts = ()

    def __init__(
        self, irreps_in: IrrepsLike, irreps_out: IrrepsLike, *, backend: str | None = None
    ) -> None:
        super().__init__(backend=backend)
        self.irreps_in, self.irreps_out = (
            Irreps(irreps_in).simplify(),
            Irreps(irreps_out).simplify(),
        )
        if self.irreps_in != self.irreps_out:
            raise ShapeError(
                f"irreps_in is {self.irreps_in} and irreps_out {self.irreps_out}: they must be "
                "the same, since nothing is changed. Pass the same, or use a Linear."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor) -> Tensor:
        """Returns x (…, D) itself."""
        check_rows("x", x, self.irreps_in, self)
        return x
