"""Launches of the kernels that mix copies.

`run_mix` is one product z t W.  `run_mixed_rows` computes products of x and y that are mixed by
weights of each row's own: one kernel serves terms of z that share w, and terms of w that share z,
two pairs (x, y) at a time; and the terms of x and of y that share w and z.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import record_cost, recording
from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Launcher,
    Launches,
    Queued,
    Step,
    Tile,
    compile_together,
    current_device,
    launch_all,
    processors,
)
from torchweft.core.printing.modules import printed
from torchweft.o3.channelwise.calls import Call as ContractionCall
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.mixing import rows_source
from torchweft.o3.mixing.blocks import CopySum, Mixing, groups, merged, prepared, uncovered
from torchweft.o3.mixing.operator import ElementRows
from torchweft.o3.mixing.source import (
    direct_source,
    fold_source,
    outer_source,
    own_source,
    prepare_source,
    product_source,
    whole_outer_source,
)

__all__ = ["run_mix", "run_mixed_rows"]

PRODUCT_TILE = Tile((128, 128, 32), 4, 2)
"""Rows, copies of the result, copies that are summed at a time: two programs on a processor."""

EXACT_TILE = Tile((64, 128, 32), 4, 3)
"""The same for products of two parts, which have two sums.  Twice the rows by twice the warps run
alone on a processor, where nothing hides the begin and the end of a tile (H200: .47 ms in place of
.40, the linear map of 100,000 rows of 128 copies)."""

DIRECT_TILES = (Tile((32, 64, 32), 4, 3), Tile((16, 32, 32), 4, 4))
"""The same for few rows, where programs read weights as they are: one launch, and more programs."""

OUTER_TILE = Tile((128, 128, 32), 8, 3)
"""Copies of t, copies of z, rows that are summed at a time."""

EXACT_OUTER_TILE = Tile((64, 64, 16), 2, 4)
"""The same for float32.  Four warps would get the instruction whose right factor lies in shared
memory with rows fastest: 32-bit numbers are transposed there one by one, in 16 conflicts."""

WHOLE_OUTER_TILE, WHOLE_OUTER_ROWS = Tile((32, 32, 32), 4, 3), 128
"""The same where one program sums all rows of a weight, and the most rows of which it does."""

PREPARE_TILE, FOLD_TILE = Tile((32,), 4, 1), Tile((16, 128), 4, 1)

OWN_WARPS = 4
"""Warps of a program that computes one row with its own weights."""

OUTER_PROGRAMS, EXACT_OUTER_PROGRAMS = 4, 24
"""Programs per processor that share the sum over rows; of exact ones four to six run together."""

A, B, ORDER, STARTS, OUT, BETWEEN = range(6)
"""Places of a call's tensors: operands, rows by element, result, memory between kernels."""


class _MixSignature(NamedTuple):
    """All that the launches of a call depend on.

    `elements` is the number of elements that have weights; None: all rows share one weight, or each
    has its own.  With elements, `shared` means that they are inside each matrix.
    """

    mixing: Mixing
    result: str
    rows: int
    parts: int
    dtype: torch.dtype
    device: torch.device
    shared: bool
    elements: int | None


class _MixRecipe(NamedTuple):
    """What follows from the signature of a call.

    Args:
        shape: of the result.
        zero: whether kernels skip numbers of it.
        launches: kernels on the tensors of a call.
        scratch: shape of the memory between kernels.
        scratch_dtype: its dtype; None: that of the operands.
    """

    shape: tuple[int, ...]
    zero: bool
    launches: Launches
    scratch: tuple[int, ...] | None = None
    scratch_dtype: torch.dtype | None = None


def run_mix(
    mixing: Mixing,
    result: str,
    a: Tensor,
    b: Tensor,
    shared: bool,
    elements: ElementRows | None = None,
) -> Tensor:
    """The result z of (t, w), t of (z, w) or w of (t, z): contiguous rows of mixings' widths."""
    count = None if elements is None else elements.starts.shape[0] - 1
    call = _MixSignature(mixing, result, a.shape[0], _parts(a), a.dtype, a.device, shared, count)
    shape, zero, launches, scratch, dtype = _recipe(call)
    out = a.new_zeros(shape) if zero else a.new_empty(shape)
    if launches.steps:
        between = None if scratch is None else a.new_empty(scratch, dtype=dtype)
        every = (a, b, *(elements or (None, None)), out, between)
        with current_device(a):
            own = not shared and elements is None
            if not own and not launches.steps[-1].kernel.compiled:
                _compile(call, _results(result, a, b), every)
            launches(every)
    if recording():
        record_cost(a.nbytes + b.nbytes + out.nbytes, 2 * a.shape[0] * mixing.products)
    return out


def _parts(x: Tensor) -> int:
    """Parts of each number for tensor cores: one where torch allows TF32, 0 for 16 bits."""
    if x.dtype != torch.float32:
        return 0
    return 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2


@functools.lru_cache(maxsize=1024)
def _recipe(call: _MixSignature) -> _MixRecipe:
    """The recipe, whose launches hold machine code of one dtype and device."""
    mixing, result, rows, parts, dtype, _, shared, elements = call
    shape = mixing.shape(result, rows, shared, elements)
    if not rows or not mixing.paths or elements == 0:
        return _MixRecipe(shape, True, Launches(()))
    own = not shared and elements is None
    zero = uncovered(mixing, result, own)
    if own:
        return _MixRecipe(shape, zero, Launches([_own(mixing, result, rows)]))
    if result == "w" and rows <= WHOLE_OUTER_ROWS:
        return _MixRecipe(shape, zero, Launches([_whole_outer(call)]))
    if result == "w":
        count, steps = _outer(call)
        scratch = (count, mixing.num_weights)
        return _MixRecipe(shape, zero, Launches(steps), scratch, torch.float32)
    tile = _direct_tile(call)
    if tile is not None:
        return _MixRecipe(shape, zero, Launches([_direct(call, tile)]))
    numbers = (elements or 1) * prepared(mixing, result) * max(1, parts)
    return _MixRecipe(shape, zero, Launches(_product(call, numbers * dtype.itemsize)), (numbers,))


def _own(mixing: Mixing, result: str, rows: int) -> Step:
    operands = {"z": "tw", "t": "zw", "w": "tz"}[result]
    places = {operands[0]: A, operands[1]: B, result: OUT}
    tile = Tile((OWN_WARPS,), OWN_WARPS, 1)
    kernel = _kernel("own", own_source(mixing, result, OWN_WARPS), (), tile)
    return Step(kernel, rows, [places[slot] for slot in "tzw"])


def _direct_tile(call: _MixSignature) -> Tile | None:
    """The largest tile of which half of the processors get one, or the smallest.

    None where the tile for prepared weights is so.
    """
    found, least = merged(call.mixing, call.result), processors(call.device) / 2
    tiles = [_product_tile(call.parts), *DIRECT_TILES]
    enough = [_programs(found, call, _fitted(tile, found)) >= least for tile in tiles]
    best = enough.index(True) if any(enough) else -1
    return tiles[best] if best else None


def _direct(call: _MixSignature, tile: Tile) -> Step:
    """The kernel of a product that reads weights as they are."""
    mixing, result, rows, parts, _, _, shared, elements = call
    found = groups(mixing, result)
    tile = _fitted(tile, found)
    source = direct_source(mixing, result, parts, elements, shared)
    taken = (*(() if elements is None else (ORDER, STARTS)), A, B, OUT)
    return Step(_kernel("direct", source, (rows,), tile), _programs(found, call, tile), taken)


def _product(call: _MixSignature, workspace_bytes: int) -> list[Step]:
    """Kernels of a product; the first prepares its weights."""
    mixing, result, rows, parts, _, _, shared, elements = call
    found = merged(mixing, result)
    tile = _fitted(_product_tile(parts), found)
    (side,) = PREPARE_TILE.blocks
    tiles = sum(-(-u // side) * -(-n // side) for u, n in mixing.shapes)
    prepare = prepare_source(mixing, result, parts, elements, shared)
    product = product_source(mixing, result, parts, elements)
    kernels = (
        _kernel("prepare", prepare, (), PREPARE_TILE),
        _kernel("product", product, (rows,), tile),
    )
    taken = (*(() if elements is None else (ORDER, STARTS)), A, BETWEEN, OUT)
    programs = _programs(found, call, tile)
    return [
        Step(kernels[0], (elements or 1) * tiles, (B, BETWEEN)),
        Step(kernels[1], programs, taken, workspace_bytes=workspace_bytes),
    ]


def _product_tile(parts: int) -> Tile:
    return EXACT_TILE if parts == 2 else PRODUCT_TILE


def _fitted(tile: Tile, found: Sequence[CopySum]) -> Tile:
    """A tile of no more copies than there are."""
    m, n, k = tile.blocks
    n = _block(max(group.block.copies for group in found), n)
    k = _block(max(block.copies for group in found for block, _ in group.runs), k)
    return tile._replace(blocks=(m, n, k))


def _programs(found: Sequence[CopySum], call: _MixSignature, tile: Tile) -> int:
    """Tiles of all rows and copies; the last one of an element may not be full."""
    m, n, _ = tile.blocks
    return sum(
        (-(-call.rows * group.block.components // m) + (call.elements or 0))
        * -(-group.block.copies // n)
        for group in found
    )


def _whole_outer(call: _MixSignature) -> Step:
    """The kernel of the weights' gradient of few rows."""
    mixing, _, rows, parts, _, _, shared, elements = call
    m, n, _ = WHOLE_OUTER_TILE.blocks
    tiles = sum(-(-t // m) * -(-z // n) for t, z in mixing.shapes)
    source = whole_outer_source(mixing, parts, elements, shared)
    taken = (*(() if elements is None else (ORDER, STARTS)), A, B, OUT)
    kernel = _kernel("whole_outer", source, (rows,), WHOLE_OUTER_TILE)
    return Step(kernel, (elements or 1) * tiles, taken)


def _outer(call: _MixSignature) -> tuple[int, list[Step]]:
    """Number of partial sums, and kernels; the last part of an element may not be full."""
    mixing, _, rows, parts, _, device, shared, elements = call
    found = [(group.block, block) for group in merged(mixing, "z") for block, _ in group.runs]
    tile, most = (EXACT_OUTER_TILE, EXACT_OUTER_PROGRAMS) if parts else (OUTER_TILE, OUTER_PROGRAMS)
    m, n, k = tile.blocks
    m = _block(max(t.copies for _, t in found), m, 64)
    n = _block(max(z.copies for z, _ in found), n)
    work = [(z.components, -(-t.copies // m) * -(-z.copies // n)) for z, t in found]
    share = rows * sum(c * tiles for c, tiles in work) // (most * processors(device))
    longest = max(c for c, _ in work)
    chunk = k * longest * max(1, -(-share // (k * longest)))
    more, numbers = elements or 0, (rows, chunk)
    programs = sum((-(-rows // (chunk // c)) + more) * tiles for c, tiles in work)
    count = -(-rows // (chunk // longest)) + more
    folds = (elements or 1) * sum(-(-u * n // FOLD_TILE.blocks[1]) for u, n in mixing.shapes)
    outer = outer_source(mixing, parts, elements)
    kernel = _kernel("outer", outer, numbers, tile._replace(blocks=(m, n, k)))
    fold = _kernel("fold", fold_source(mixing, elements, shared), numbers, FOLD_TILE)
    tables = () if elements is None else (ORDER, STARTS)
    workspace_bytes = 4 * count * mixing.num_weights
    return count, [
        Step(kernel, programs, (*tables, A, B, BETWEEN), workspace_bytes=workspace_bytes),
        Step(fold, folds, (*tables[1:], BETWEEN, OUT)),
    ]


def _results(result: str, a: Tensor, b: Tensor) -> str:
    """Results whose kernels a call and its gradients run."""
    if result == "w":
        return result
    by_rows = {"z": "t", "t": "z"}[result] if a.requires_grad else ""
    return result + by_rows + ("w" if b.requires_grad else "")


def _compile(call: _MixSignature, results: str, every: tuple[Tensor | None, ...]) -> None:
    """Compile the kernels of some results together."""
    like, order, starts = (every[n] for n in (A, ORDER, STARTS))
    assert like is not None
    calls = []
    for result in results:
        recipe = _recipe(call._replace(result=result))
        between = like.new_empty(1, dtype=recipe.scratch_dtype)
        alike = (like, like, order, starts, like, between)
        steps = recipe.launches.steps
        calls += [Call(step.kernel, [alike[n] for n in step.taken]) for step in steps]
    compile_together(calls)


def _kernel(name: str, source: str, numbers: tuple[int, ...], tile: Tile) -> Kernel:
    return Kernel(printed(f"o3_mixing_{name}", source, f"mixing_{name}"), numbers, (), tile)


def _block(count: int, most: int, least: int = 16) -> int:
    return min(most, max(least, 1 << max(count - 1, 0).bit_length()))


class RowLayout(NamedTuple):
    """Layout of a kernel for rows with own weights.

    Args:
        height: copies u of a tile of weights.
        warps: warps per program.
    """

    height: int
    warps: int


ROW_LAYOUTS = {
    "z": RowLayout(8, 1),
    "w": RowLayout(16, 4),
    "x": RowLayout(16, 2),
    "y": RowLayout(16, 2),
}
"""Layouts of kernels by the first slot of their result: the fastest of some ten on an H200.

Weights that are copied into shared memory ahead took a third longer.
"""

MOST_ROW_PAIRS = 2
"""Pairs of x and y in a kernel, at most."""


MixedRowLaunch = tuple[str, Mapping[str, tuple[int, ...]], tuple[int, ...]]
"""Slots of a kernel's results; for each operand numbers of the call's tensors, which are added; for
each slot the number of the call's result."""


def run_mixed_rows(
    structure: Structure, mixing: Mixing, call: ContractionCall, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The results of a call, of contiguous tensors (rows, width)."""
    like, found = tensors[0], dict[int, Tensor]()
    rows, more = like.shape[0], list[tuple[int, Tensor]]()
    widths = dict(zip("xyzw", structure.widths[:2] + mixing.widths[1:], strict=True))
    queue = []
    for result, read, to in _row_launches(call) if rows else ():
        values = {
            name: functools.reduce(torch.add, [tensors[t] for t in which])
            for name, which in read.items()
        }
        for slot, k in zip(result, to, strict=True):
            empty = like.new_empty if _covered(structure, mixing, slot) else like.new_zeros
            made = values[slot if result in "zw" else f"g{slot}"] = empty(rows, widths[slot])
            if found.setdefault(k, made) is not made:
                more.append((k, made))
        pairs = sum(name[0] == "x" for name in read) if result in "zw" else 1
        launcher = _launcher(structure, mixing, result, pairs, rows, like.dtype, like.device)
        names = rows_source.operands(result, pairs)
        queue.append(Queued(launcher, [values[name] for name in names]))
    with current_device(like):
        launch_all(queue)
    for k, part in more:
        found[k] += part
    if recording():
        moved = sum(t.nbytes for launch in queue for t in launch.operands if t is not None)
        record_cost(moved, 2 * len(queue) * rows * mixing.products)
    return [
        found[k] if k in found else like.new_zeros(rows, widths[slot])
        for k, (slot, _) in enumerate(call.results)
    ]


@functools.lru_cache(maxsize=1024)
def _row_launches(call: ContractionCall) -> tuple[MixedRowLaunch, ...]:
    return (*_sums(call), *_gradients(call))


def _sums(call: ContractionCall) -> Iterator[MixedRowLaunch]:
    """Kernels of the results z and w."""
    for k, (slot, terms) in enumerate(call.results):
        if slot not in "zw":
            continue
        shared: dict[int, list[tuple[int, int]]] = {}
        for x, y, other in terms:
            shared.setdefault(other, []).append((x, y))
        for other, pairs in shared.items():
            for first in range(0, len(pairs), MOST_ROW_PAIRS):
                read = {"w" if slot == "z" else "z": (other,)}
                for i, (x, y) in enumerate(pairs[first : first + MOST_ROW_PAIRS]):
                    read |= {f"x{i}": (x,), f"y{i}": (y,)}
                yield slot, read, (k,)


def _gradients(call: ContractionCall) -> Iterator[MixedRowLaunch]:
    """Kernels of the results x and y, one of each at a time."""
    wanted: dict[tuple[int, int, int], dict[str, tuple[int, list[int]]]] = {}
    for k, (slot, terms) in enumerate(call.results):
        if slot in "xy":
            nth = sum(result.slot == slot for result in call.results[:k])
            for factor, z, w in terms:
                wanted.setdefault((z, w, nth), {}).setdefault(slot, (k, []))[1].append(factor)
    for (z, w, _), of in wanted.items():
        slots = "".join(s for s in "xy" if s in of)
        read = {"y0" if s == "x" else "x0": tuple(of[s][1]) for s in slots}
        yield slots, read | {"z": (z,), "w": (w,)}, tuple(of[s][0] for s in slots)


@functools.lru_cache(maxsize=1024)
def _launcher(
    structure: Structure, mixing: Mixing, result: str, pairs: int, rows: int, *variant: object
) -> Launcher:
    """A launcher; `variant` is what else its machine code depends on."""
    height, warps = ROW_LAYOUTS[result[0]]
    source = rows_source.source(structure, mixing, result, pairs, height)
    kernel = printed("o3_mixed", source, rows_source.MIXED_PRODUCT)
    return Launcher(kernel, rows, (), (), (), Tile((warps,), warps, 1))


@functools.lru_cache(maxsize=1024)
def _covered(structure: Structure, mixing: Mixing, slot: str) -> bool:
    """Whether all numbers of a row belong to paths."""
    if slot in "zw":
        return not uncovered(mixing, slot, True)
    return rows_source.reached(structure, mixing, slot) == structure.width(slot)
