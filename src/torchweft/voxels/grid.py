"""Grids: convolution geometry, half tables of symmetric kernels, space-filling curves.

    submanifold   q = o + j·dil − (k − 1)·dil // 2      outputs are the inputs
    strided       q = o·s − p + j·dil                   o in 0 … ⌊(S + 2p − dil (k − 1) − 1) / s⌋
    transposed    o = q·s − p + j·dil                   o in 0 … (S − 1) s − 2p + dil (k − 1)
    floor         q = o·s − c + j·dil                   o = ⌊q / s⌋ of every input q
    floor-transposed   o = q·s − c + j·dil              the outputs are given

q is an input voxel, o an output voxel, j = 0 … k − 1 a position in the kernel.  The number of an
offset counts the positions (j0, j1, …) in row-major order, as torch stores its weights.  The floor
modes centre an odd kernel, c = dil·(k − 1)/2, and begin an even one at its voxel, c = 0.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.core.operators.operator import below_transforms, compiling
from torchweft.core.tables import TensorCache
from torchweft.errors import DTypeError, ShapeError

__all__ = [
    "CONV_MODES",
    "Geometry",
    "Size",
    "axes_of",
    "geometry",
    "hilbert_keys",
    "hilbert_order",
    "integer",
    "whole",
    "z_keys",
    "z_order",
]

CONV_MODES = ("submanifold", "strided", "transposed", "floor", "floor-transposed")

Size = SupportsIndex | Sequence[SupportsIndex]
"""One integer for all axes, or one per axis, of Python, NumPy or torch."""


class Geometry(NamedTuple):
    """The geometry of one layer, one number per axis; see the formulas above."""

    mode: str
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def num_offsets(self) -> int:
        """K, the positions of the kernel."""
        return math.prod(self.kernel_size)

    @property
    def symmetric(self) -> bool:
        """Whether offset K − 1 − k of a submanifold kernel is the opposite of offset k."""
        return all(k % 2 == 1 for k in self.kernel_size)

    @property
    def transposed(self) -> bool:
        """Whether an input meets the outputs around input·stride, not the other way round."""
        return self.mode in ("transposed", "floor-transposed")

    @property
    def outputs(self) -> str:
        """The rule of the output's voxels: "floor", or "torch" in all other modes."""
        return "floor" if self.mode.startswith("floor") else "torch"

    @property
    def has_outputs(self) -> bool:
        """Whether a map's outputs are other voxels than its inputs."""
        if self.mode == "floor":
            return any(s != 1 for s in self.stride)
        return self.mode != "submanifold"

    @property
    def begin(self) -> tuple[int, ...]:
        """Subtracted from j·dil: the padding; what centres the kernel where there is none."""
        axes = zip(self.kernel_size, self.dilation, strict=True)
        if self.mode == "submanifold":  # as torch's "same"
            return tuple((k - 1) * d // 2 for k, d in axes)
        if self.outputs == "floor":
            return tuple((k - 1) // 2 * d if k % 2 else 0 for k, d in axes)
        return self.padding

    def offsets(self) -> list[tuple[int, ...]]:
        """(K, d): j·dil − begin, row-major."""
        axes = [
            [j * d - b for j in range(k)]
            for k, d, b in zip(self.kernel_size, self.dilation, self.begin, strict=True)
        ]
        return list(itertools.product(*axes))

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial shape of the output; an axis shorter than the kernel has no output."""
        if self.mode == "submanifold":
            return tuple(shape)
        if self.outputs == "floor":
            steps = zip(shape, self.stride, strict=True)
            return tuple(n * s if self.transposed else -(-n // s) for n, s in steps)
        found = []
        for n, k, s, p, d in zip(shape, *self[1:], strict=True):
            last = (n + 2 * p - d * (k - 1) - 1) // s
            if self.mode == "transposed":
                last = (n - 1) * s - 2 * p + d * (k - 1) if n else -1
            found.append(max(0, last + 1))
        return tuple(found)


def geometry(
    dim: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    mode: str = "submanifold",
) -> Geometry:
    """The geometry of a layer over `dim` axes, checked.

    Raises:
        ShapeError: a number of axes that is not `dim`, a size or a step below 1, a negative
            padding, a submanifold layer with a stride, or a floor layer with a padding.
    """
    numbers = type(kernel_size) is type(stride) is type(padding) is type(dilation) is int
    if numbers and not compiling():  # dynamo warns of look-ups
        return _cached(dim, kernel_size, stride, padding, dilation, mode)  # type: ignore[arg-type]
    return _checked(dim, kernel_size, stride, padding, dilation, mode)


def _checked(
    dim: int, kernel_size: Size, stride: Size, padding: Size, dilation: Size, mode: str
) -> Geometry:
    if mode not in CONV_MODES:
        raise ShapeError(
            f"mode is {mode!r}: it must be one of {', '.join(CONV_MODES)}. Pass one of them."
        )
    sizes = {
        "kernel_size": axes_of("kernel_size", kernel_size, dim, least=1),
        "stride": axes_of("stride", stride, dim, least=1),
        "padding": axes_of("padding", padding, dim, least=0),
        "dilation": axes_of("dilation", dilation, dim, least=1),
    }
    if mode == "submanifold":
        if any(s != 1 for s in sizes["stride"]):
            raise ShapeError(
                f"stride is {sizes['stride']} in a submanifold layer, whose outputs are its "
                "inputs: it must be 1. Use SparseConv, or pass submanifold=False, to stride."
            )
        sizes["padding"] = (0,) * dim  # the kernel is centred, whatever was given
    if mode.startswith("floor") and any(sizes["padding"]):
        raise ShapeError(
            f"padding is {sizes['padding']} in a layer with outputs='floor', which centres its "
            "kernel: it must be 0. Leave padding out, or pass outputs='torch'."
        )
    return Geometry(mode, **sizes)


_cached = functools.lru_cache(maxsize=1024)(_checked)
"""For integers only: the hash of True is that of 1, but True is an error."""


def axes_of(name: str, value: Size, dim: int, least: int) -> tuple[int, ...]:
    """One number for each axis, checked."""
    if isinstance(value, str):
        raise DTypeError(
            f"{name} is {value!r}: it must be an integer, or {dim} of them. Pass the name of a map "
            f"by its keyword: indice_key={value!r}."
        )
    given: tuple[object, ...] = (value,) * dim
    if isinstance(value, Iterable) and getattr(value, "ndim", None) != 0:  # an array may be one
        given = tuple(value)
    numbers = tuple([n if type(n) is int else _axis_of(name, n, dim) for n in given])
    if len(numbers) != dim:
        raise ShapeError(
            f"{name} has {len(numbers)} numbers but the coordinates have {dim} axes: "
            f"one number for all axes or {dim} are needed. Pass "
            f"{name}={numbers[:1] * dim}, for example."
        )
    if any(n < least for n in numbers):
        raise ShapeError(
            f"{name} is {numbers}: every number must be at least {least}. Correct {name}."
        )
    return numbers


def _axis_of(name: str, number: object, dim: int) -> int:
    remedy = f", or {dim} of them. Pass {name}=(…) with integers."
    return integer(f"{name} holds", number, remedy)


def integer(begin: str, value: object, remedy: str) -> int:
    """An integer of Python, NumPy or torch as Python's; no truth value.

    Raises:
        DTypeError: it is something else; begin and remedy are the ends of the text.
    """
    if type(value) is int:
        return value
    truth = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
    try:
        found = None if truth else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None:
        raise DTypeError(f"{begin} {value!r}: it must be an integer{remedy}")
    return found


_whole_cache: TensorCache[Tensor] = TensorCache()


def whole(table: Tensor, order: Tensor | None, offsets: int) -> Tensor:
    """All K rows of a table of which only half may be stored.

    In a mirrored table the row that reads q at offset k is read by q at offset K − 1 − k.  Its
    first K // 2 + 1 rows, the centre last, then determine the others.

    Args:
        table: (K, N) or (K // 2 + 1, N) int32, −1 for none.
        order: (N,) the row of each column; None: columns are rows.
        offsets: K.
    """
    if len(table) == offsets:
        return table
    return cached_table(_whole_cache, _mirrored, table, order)


def cached_table(
    cache: TensorCache[Tensor], build: Callable[..., Tensor], *tensors: Tensor | None
) -> Tensor:
    """The result of a function of tables, cached with them unless it is traced."""
    if compiling():
        return build(*tensors)
    return cache.get(tensors, None, lambda: below_transforms(build)(*tensors))


def _mirrored(kept: Tensor, order: Tensor | None) -> Tensor:
    half, count = len(kept) - 1, kept.shape[1]
    column = torch.arange(count, dtype=torch.int32, device=kept.device)
    own = column if order is None else order
    place = own if order is None else torch.empty_like(order).index_copy_(0, order.long(), column)
    read = kept[:half].long()
    at = torch.where(read >= 0, place[read.clamp(min=0)].long(), count)  # none: past the last
    rest = kept.new_full((half, count + 1), -1).scatter_(1, at, own.expand(half, count))
    return torch.cat([kept, rest[:, :count].flip(0)])


BITS_PER_WORD = 62
"""Bits of a key that one int64 holds."""


def z_order(coords: Tensor) -> Tensor:
    """The permutation that sorts voxels along the z curve.

    Args:
        coords: (N, d) integers, d = 1 to 4; negative ones are allowed.

    Returns:
        (N,) int64.

    Raises:
        ShapeError, DTypeError: coordinates that are not so.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> voxels.z_order(torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]]))
        tensor([1, 2, 3, 0])
    """
    return _ascending(z_keys(coords))


def hilbert_order(coords: Tensor) -> Tensor:
    """The permutation that sorts voxels along the Hilbert curve.

    Args:
        coords: (N, d) integers, d = 1 to 4; negative ones are allowed.

    Returns:
        (N,) int64.

    Raises:
        ShapeError, DTypeError: coordinates that are not so.

    Source: Skilling: Programming the Hilbert curve, AIP Conference Proceedings 707, 2004.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]])
        >>> coords[voxels.hilbert_order(coords)].diff(dim=0).abs().sum(1)  # steps to neighbours
        tensor([1, 1, 1])
    """
    return _ascending(hilbert_keys(coords))


def z_keys(coords: Tensor) -> Tensor:
    """Keys of voxels on the z curve: the bits of the axes interleaved, highest first.

        x₂ y₂ z₂ x₁ y₁ z₁ x₀ y₀ z₀

    Args:
        coords: (N, d) integers, d = 1 to 4, of any range of int32; negative ones are allowed.

    Returns:
        (words, N) int64, the highest word first.  Keys of more than 62 bits take several words.
        Distinct voxels have distinct keys.  The cube begins at each axis's lowest coordinate and is
        as wide as the widest axis.

    Raises:
        ShapeError, DTypeError: coordinates that are not so.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> voxels.z_keys(torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]]))
        tensor([[3, 0, 1, 2]])
    """
    return _interleave(*_cube(coords))


def hilbert_keys(coords: Tensor) -> Tensor:
    """Keys of voxels on the Hilbert curve, see `z_keys`.

    The z curve after reflections by which each step in a full cube goes to a neighbour.  From the
    coarsest bit to the finest, an axis whose bit is set reverses the finer bits of the first axis,
    and one whose bit is not set exchanges its finer bits with them; the result is a Gray code.

    Args:
        coords: (N, d) integers, d = 1 to 4, of any range of int32; negative ones are allowed.

    Returns:
        (words, N) int64, the highest word first.

    Raises:
        ShapeError, DTypeError: coordinates that are not so.

    Source: Skilling: Programming the Hilbert curve, AIP Conference Proceedings 707, 2004.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> voxels.hilbert_keys(torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]])).sort().values
        tensor([[0, 1, 2, 3]])
    """
    axes, bits = _cube(coords)
    for bit in reversed(range(1, bits)):
        finer = (1 << bit) - 1
        for i, axis in enumerate(axes):
            turned = axis >> bit & 1 == 1
            swap = torch.where(turned, finer, (axes[0] ^ axis) & finer)
            axes[0] = axes[0] ^ swap
            if i:  # the first axis exchanged with itself is unchanged
                axes[i] = torch.where(turned, axis, axis ^ swap)
    for i in range(1, len(axes)):
        axes[i] = axes[i] ^ axes[i - 1]
    flips = torch.zeros_like(axes[-1])
    for bit in range(1, bits):
        flips ^= torch.where(axes[-1] >> bit & 1 == 1, (1 << bit) - 1, 0)
    return _interleave([axis ^ flips for axis in axes], bits)


def _cube(coords: Tensor) -> tuple[list[Tensor], int]:
    """The axes, shifted to begin at 0, and the bits of the widest."""
    check_tensors(coords=coords)
    if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
        raise DTypeError(
            f"coords are {coords.dtype}: a curve runs through integers. Pass coords.int(), or "
            "voxelize(points, size) first."
        )
    if coords.dim() != 2 or not 1 <= coords.shape[1] <= 4:
        raise ShapeError(
            f"coords are {tuple(coords.shape)}: they must be (N, d), d = 1 to 4 axes. Leave the "
            "batch column out: coords[:, 1:]."
        )
    if not coords.shape[0]:
        return list(coords.long().T), 1
    cells = coords.long() - coords.long().amin(0)
    return list(cells.T), max(int(cells.max()).bit_length(), 1)


def _interleave(axes: list[Tensor], bits: int) -> Tensor:
    places = [(axis, bit) for bit in reversed(range(bits)) for axis in axes]
    words = []
    for start in range(0, len(places), BITS_PER_WORD):
        word = torch.zeros_like(axes[0])
        for axis, bit in places[start : start + BITS_PER_WORD]:
            word = word << 1 | (axis >> bit & 1)
        words.append(word)
    return torch.stack(words)


def _ascending(keys: Tensor) -> Tensor:
    """The order of keys, by stable sorts from the lowest word to the highest."""
    order = torch.arange(keys.shape[1], device=keys.device)
    for word in reversed(keys):
        order = order.index_select(0, torch.argsort(word.index_select(0, order), stable=True))
    return order
