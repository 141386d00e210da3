"""Linear maps between irreps: a matrix for each pair of items that are the same irrep; identity.

z[o, w] = Σ_{(i, o)} factor Σ_u weight_uw x[i, u]  (+ bias_w for 0e)

One weight serves all rows, or each element has a weight, or each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.operator import compiling
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.o3.irreps.instructions import chosen
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.o3.irreps.layout import (
    broadcast,
    check_rows,
    join,
    parts_of,
    side_by_side,
    split,
    steps,
)
from torchweft.o3.mixing.blocks import CopyBlock as Block
from torchweft.o3.mixing.blocks import MatrixPath as Path
from torchweft.o3.mixing.blocks import Mixing
from torchweft.o3.mixing.operator import mix, rows_of_elements, serves_mix
from torchweft.o3.tensor_product.module import RowLayer, WeightedModule

__all__ = [
    "Identity",
    "Linear",
    "LinearInstruction",
]


class LinearInstruction(NamedTuple):
    """From item i_in to item i_out; i_in is -1 for a bias, whose weight is none of `weight`."""

    i_in: int
    i_out: int
    path_shape: tuple[int, ...]
    path_weight: float

    @property
    def has_weight(self) -> bool:
        """Whether it is no bias, which has a weight of its own."""
        return self.i_in >= 0

    @property
    def num_weights(self) -> int:
        """Numbers in its weight; 0 for a bias."""
        return math.prod(self.path_shape) if self.has_weight else 0


class Linear(WeightedModule):
    """z[o, w] = Σ_{(i, o)} factor Σ_u weight_uw x[i, u] (+ bias_w): equivariant under O(3).

    The factor is 1/√(Σ copies of the items into the output) ("element"), or with the item's own
    copies times the number of such items ("path").  One matrix product an output item.

    Args:
        irreps_in: of x.
        irreps_out: of z; items that nothing reaches are zero.
        f_in: x is (…, f_in, D) and the weight (f_in, f_out, weight_numel): every feature has its
            own, and the factor counts f_in copies more.  None: neither has that dimension.
        f_out: z is (…, f_out, D_out); given together with f_in.
        num_elements: how many elements have a matrix of their own; the weight is (num_elements,
            weight_numel), and a call says which element a row of x is.  None: there is one matrix.
        internal_weights: whether the module owns weight and bias; None: where they are shared.
        shared_weights: one weight for all rows (None), or one a row.
        instructions: (i_in, i_out) of items to connect; None: all that are the same irrep.
        biases: whether 0e items have a bias, for all or one flag an item.
        path_normalization: "element" or "path".
        layout: "mul_ir", e3nn's, or "ir_mul", of x and z; weights have one order.
        backend: "triton", "torch", or None for the fastest that can serve; "triton" raises
            BackendError where it holds no such matrices: on the CPU, with features, and with
            shared weights in float64.

    Raises:
        WeftError: instructions or biases that do not fit the irreps.
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
                f"f_in is {f_in} and f_out is {f_out}: features go in and out together. Pass both, "
                "or none."
            )
        if num_elements is not None:
            _check_alone(num_elements, f_in, shared_weights, biases)
        irreps, out = Irreps(irreps_in), Irreps(irreps_out)
        paths = _paths(irreps, out, instructions)
        normalization = chosen("path_normalization", path_normalization, ("element", "path"))
        found = [
            *_normalised(paths, irreps, out, f_in or 1, normalization),
            *(LinearInstruction(-1, k, (out[k].mul,), 1.0) for k in _biased(biases, out)),
        ]
        features = () if f_in is None or f_out is None else (f_in, f_out)
        shared = True if shared_weights is None else shared_weights
        elements = () if num_elements is None else (num_elements,)
        dims = features or elements
        super().__init__(found, out, internal_weights, shared, layout, backend, dims)
        self.irreps_in, self.features, self.num_elements = irreps, features, num_elements
        self._calls: CallCache[bool] = CallCache()
        self.mixing = None if features else _mixing(found, irreps, out, layout)
        self._into = [
            [n for n, i in enumerate(found) if i.i_out == k and i.num_weights]
            for k in range(len(out))
        ]
        self.bias_numel = sum(i.path_shape[0] for i in found if i.i_in < 0)
        owned = self.bias_numel > 0 and (shared if internal_weights is None else internal_weights)
        if owned:
            self.bias = nn.Parameter(torch.zeros(*features[1:], self.bias_numel))
        else:  # an empty tensor, as e3nn's
            self.register_buffer("bias", torch.empty(0), persistent=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.irreps_in} -> {self.irreps_out} | "
            f"{self.weight_numel} weights)"
        )

    def forward(
        self,
        x: Tensor,
        weight: Tensor | Sequence[Tensor] | None = None,
        bias: Tensor | None = None,
        *,
        element: Tensor | None = None,
    ) -> Tensor:
        """The map.

        Args:
            x: (…, D), or (…, f_in, D); with num_elements (N, D).
            weight: (weight_numel,), or (…, weight_numel) without shared_weights; with f_in, f_out
                or num_elements in front of weight_numel; None: the module's.
            bias: (bias_numel,), or (…, bias_numel); with f_out in front; None: the module's.
            element: (N,) integers below num_elements, in any order; rows of an element are found
                once for a tensor.

        Returns:
            (…, D_out), or (…, f_out, D_out), in the inputs' dtype.
        """
        maybe_cached = bias is None and not compiling() and bool(self._calls)
        z = self._cached(x, weight, element) if maybe_cached else None
        if z is not None:
            return z
        check_rows("x", x, self.irreps_in, self)
        self._check_element(x, element)
        flat = self.checked_weight(weight)
        shift = self._checked_bias(bias)
        given = same_kind(x=x, weight=flat, bias=shift)
        if element is not None:
            return self._by_element(given[0], None if flat is None else given[1], element)
        if self.features and (x.dim() < 2 or x.shape[-2] != self.features[0]):
            f_in = self.features[0]
            raise ShapeError(
                f"x is {tuple(x.shape)} but f_in is {f_in}: it must be "
                f"(…, {f_in}, {self.irreps_in.dim}). Put the features before D."
            )
        flat = None if flat is None else given[1]
        shift = None if shift is None else given[-1]
        return self._mapped(given[0], flat, shift)

    def _by_element(self, x: Tensor, weight: Tensor | None, element: Tensor) -> Tensor:
        """(N, D_out): each row by the matrices of its element."""
        assert self.mixing is not None
        assert self.num_elements is not None
        if weight is None:
            return x.new_zeros(x.shape[0], self.irreps_out.dim)
        kernels = serves_mix(self.mixing, x, True, self.backend)
        self._cache((x, weight, element), kernels)
        rows = rows_of_elements(element, self.num_elements)
        return mix(self.mixing, x, weight, rows, kernels=kernels)

    def _cached(self, x: Tensor, weight: Any, element: Tensor | None) -> Tensor | None:
        """The result of a cached call, which is one operator; None: it is not cached."""
        if weight is None:
            weight = self.weight
        known = signature((x, weight) if element is None else (x, weight, element))
        kernels = None if known is None else self._calls.get(known)
        if kernels is None:
            return None
        assert self.mixing is not None
        if element is None:
            return mix(self.mixing, x, weight)
        assert self.num_elements is not None
        return mix(
            self.mixing, x, weight, rows_of_elements(element, self.num_elements), kernels=kernels
        )

    def _cache(self, given: Sequence[Tensor], kernels: bool) -> None:
        """Cache a call that was checked and is one operator, and whether kernels run it."""
        known = signature(given)
        if known is not None:
            self._calls.keep(known, kernels)

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

    def _mapped(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """(…, D_out) of x (…, D); features, if there are any, in front of both."""
        if weight is not None and serves_mix(self.mixing, x, self.shared_weights, self.backend):
            if x.dim() == weight.dim() + 1 == 2 and bias is None:
                self._cache((x, weight), True)
            return self._mixed(self.mixing, x, weight, bias)
        if weight is not None and bias is None and self.shared_weights and not self.features:
            return self._by_matrices(x, weight)
        blocks, lead = split(x, self.irreps_in, self.layout), x.shape[:-1]
        weights = [] if weight is None else self._matrices(weight)
        if self.features:  # copies are those of every feature
            blocks, lead = [block.flatten(-3, -2) for block in blocks], lead[:-1]
        if not self.shared_weights and weight is not None:
            lead = broadcast([lead, weight.shape[: -1 - len(self.features)]])
        out = []
        for k, item in enumerate(self.irreps_out):
            rows = self._item(k, blocks, weights)
            if rows is None or self.features:
                shape = (*lead, *self.features[1:], item.mul, item.ir.dim)
                rows = x.new_zeros(shape) if rows is None else rows.reshape(shape)
            out.append(rows if bias is None else self._shifted(k, rows, bias))
        return join(out, self.layout) if out else x.new_zeros(*lead, *self.features[1:], 0)

    def _mixed(self, mixing: Mixing, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map by one operator, without features."""
        lead = x.shape[:-1]
        if not self.shared_weights:
            lead = broadcast([lead, weight.shape[:-1]])
            weight = weight.expand(*lead, weight.shape[-1]).flatten(0, -2)
        rows = x.expand(*lead, x.shape[-1]).reshape(math.prod(lead), x.shape[-1])
        z = mix(mixing, rows, weight).view(*lead, mixing.width("z"))
        if bias is None:
            return z
        shifts = [
            self._shifted(k, bias.new_zeros(*bias.shape[:-1], item.mul, item.ir.dim), bias)
            for k, item in enumerate(self.irreps_out)
        ]
        return z + join(shifts, self.layout)

    def _by_matrices(self, x: Tensor, weight: Tensor) -> Tensor:
        """(…, D_out): of each item of the output all rows by one matrix."""
        parts = parts_of(x, [item.dim for item in self.irreps_in])
        lead, found, weights = x.shape[:-1], [], self._matrices(weight)
        for k, (mul, ir) in enumerate(self.irreps_out):
            if not self._into[k]:
                found.append(x.new_zeros(*lead, mul * ir.dim))
                continue
            items = [self.instructions[n].i_in for n in self._into[k]]
            rows = [self._copies(parts[i], self.irreps_in[i].mul, ir.dim) for i in items]
            z = torch.mm(*self._factors(k, rows, weights))
            if ir.dim > 1 and self.layout == "mul_ir":
                z = z.view(-1, ir.dim, mul).mT
            found.append(z.reshape(*lead, mul * ir.dim))
        return side_by_side(found, -1) if found else x.new_zeros(*lead, 0)

    def _copies(self, part: Tensor, mul: int, components: int) -> Tensor:
        """(rows · components, mul) of an item of x; of scalars the rows themselves."""
        if components > 1 and self.layout == "mul_ir":
            part = part.reshape(-1, mul, components).mT
        return part.reshape(-1, mul)

    def _item(self, k: int, blocks: list[Tensor], matrices: list[Tensor]) -> Tensor | None:
        """(…, copies, 2l+1) of one item of the output."""
        if not self._into[k] or not matrices:
            return None
        rows = [blocks[self.instructions[n].i_in].mT for n in self._into[k]]
        together, matrix = self._factors(k, rows, matrices)
        if matrix.dim() > 2:
            return (together @ matrix).mT
        # torch folds rows by itself only where the matrix requires a gradient
        rows_by_matrix = together.flatten(0, -2) @ matrix
        return rows_by_matrix.view(*together.shape[:-1], matrix.shape[1]).mT

    def _factors(self, k: int, rows: list[Tensor], matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What goes into one item of the output side by side, and the matrix that it meets.

        The factor of the paths goes into the rows, which are few where its time is seen.  Bits
        must not depend on the number of rows: compiled code does not know it.
        """
        chosen = [matrices[n] for n in self._into[k]]
        factor, *others = (self.instructions[n].path_weight for n in self._into[k])
        if any(other != factor for other in others):
            factors = (factor, *others)
            rows = [row * f for row, f in zip(rows, factors, strict=True)]
            factor = 1.0
        together, matrix = side_by_side(rows, -1), side_by_side(chosen, -2)
        return together if factor == 1 else together * factor, matrix

    def _matrices(self, weight: Tensor) -> list[Tensor]:
        """(…, copies in, copies out) of the instructions, those of every feature."""
        found = self.views(weight)
        if not self.features:
            return found
        return [m.transpose(-3, -2).flatten(-2).flatten(-3, -2) for m in found]

    def _shifted(self, k: int, rows: Tensor, bias: Tensor) -> Tensor:
        """(…, mul, 2l+1): an item of the output with its bias, if it has one."""
        first = 0
        for instruction in self.instructions:
            if instruction.i_in < 0:
                (count,) = instruction.path_shape
                if instruction.i_out == k:
                    return rows + bias.narrow(-1, first, count).unsqueeze(-1)
                first += count
        return rows

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
    num_elements: int,
    f_in: int | None,
    shared_weights: bool | None,
    biases: bool | Sequence[bool],
) -> None:
    """Matrices by element go with no other choice of weights."""
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
            if not 0 <= index < len(items):
                raise IndexRangeError(
                    f"instruction ({i}, {k}) names item {index} of {name}, which has {len(items)}: "
                    f"{items or 'none'}. Pass an index from 0 to {len(items) - 1}."
                )
        if irreps[i].ir != out[k].ir:
            raise ShapeError(
                f"instruction ({i}, {k}) connects {irreps[i]} with {out[k]}: a linear map between "
                "different irreps that is equivariant is zero. Connect items of one irrep."
            )
    return paths


def _mixing(
    instructions: Iterable[LinearInstruction], irreps: Irreps, out: Irreps, layout: str
) -> Mixing:
    def blocks(items: Irreps) -> tuple[Block, ...]:
        return tuple(
            Block(place.start, item.ir.dim, *steps(item, layout), item.mul)
            for place, item in zip(items.slices(), items, strict=True)
        )

    paths, offset = [], 0
    for instruction in instructions:
        if instruction.num_weights:
            i, k = instruction.i_in, instruction.i_out
            paths.append(Path(i, k, offset, instruction.path_weight))
            offset += instruction.num_weights
    return Mixing((irreps.dim, out.dim, offset), blocks(irreps), blocks(out), tuple(paths))


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
                f"biases asks for one of {item}: only 0e may have a bias, another irrep would turn "
                "away from it. Pass False there, or biases=True for all 0e."
            )
    return [k for k, flag in enumerate(biases) if flag]


class Identity(RowLayer):
    """z = x.

    Args:
        irreps_in: of x, simplified.
        irreps_out: of z, the same.
        backend: "torch" or None, which are the same.

    Raises:
        ShapeError: the irreps differ.
        BackendError: another backend is requested.
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
                f"irreps_in is {self.irreps_in} and irreps_out {self.irreps_out}: what is not "
                "changed has the same irreps. Pass the same, or a Linear between them."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor) -> Tensor:
        """Returns x (…, D) itself."""
        check_rows("x", x, self.irreps_in, self)
        return x
