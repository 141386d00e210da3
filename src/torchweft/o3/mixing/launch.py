"""Launches of the kernels of weights that mix copies.

Of products with weights of each row's own, terms of z that share w, and of w that share z, are one
kernel's, two pairs (x, y) at a time; so are those of x and of y that share w and z.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from torchweft.o3.mixing import source as generator
from torchweft.o3.mixing.blocks import Mixing, Path, merged, prepared, uncovered, weights
from torchweft.o3.mixing.operator import ElementRows

__all__ = ["run_mix", "run_mixed_rows"]

PRODUCT_TILE = Tile((128, 128, 32), 4, 2)
"""Rows, copies of the result, copies that are summed at a time: two programs on a processor."""

EXACT_TILE = Tile((64, 128, 32), 4, 3)
"""The same for products of parts, which have two sums.  Twice the rows by twice the warps run alone
on a processor, where nothing hides what a tile begins and ends with (H200: .47 ms in place of .40,
the linear map of 100,000 rows of 128 copies)."""

OUTER_TILE = Tile((128, 128, 32), 8, 3)
"""Copies of t, copies of z, rows that are summed at a time."""

EXACT_OUTER_TILE = Tile((64, 64, 16), 2, 4)
"""The same for float32.  Four warps would get the instruction whose right factor lies in shared
memory with rows fastest: 32-bit numbers are turned round there one by one, in 16 conflicts."""

PREPARE_TILE, FOLD_TILE = Tile((32,), 4, 1), Tile((16, 128), 4, 1)

OWN_WARPS = 4
"""Warps of a program that computes one row with its own weights."""

OUTER_PROGRAMS, EXACT_OUTER_PROGRAMS = 4, 24
"""Programs for each processor that share the sum over rows; of exact ones four to six run together.
"""


A, B, ORDER, STARTS, OUT, SCRATCH = range(6)
"""Places of a call's tensors: operands, rows by element, result, memory between kernels."""


class _MixRecipe(NamedTuple):
    """What follows from the signature of a call.

    Args:
        shape: of the result.
        zero: whether kernels leave numbers of it out.
        launches: on the tensors of a call.
        scratch: shape of the memory between kernels.
        wide: whether the memory is float32 for operands of every dtype.
    """

    shape: tuple[int, ...]
    zero: bool
    launches: Launches
    scratch: tuple[int, ...] | None = None
    wide: bool = False


def run_mix(
    mixing: Mixing,
    result: str,
    a: Tensor,
    b: Tensor,
    shared: bool,
    kinds: ElementRows | None = None,
) -> Tensor:
    """The result z of (t, w), t of (z, w) or w of (t, z): contiguous rows of mixings' widths."""
    given = (a.shape[0], _parts(a), a.dtype, a.device, shared, _count(kinds))
    shape, zero, launches, scratch, wide = _recipe(mixing, result, *given)
    out = a.new_zeros(shape) if zero else a.new_empty(shape)
    if launches.steps:
        between = None
        if scratch is not None:
            between = a.new_empty(scratch, dtype=torch.float32) if wide else a.new_empty(scratch)
        every = (a, b, *(kinds or (None, None)), out, between)
        with current_device(a):
            if scratch is not None and not launches.steps[-1].kernel.compiled:
                trained = result != "w" and (a.requires_grad or b.requires_grad)
                _compile(mixing, "tzw" if trained else result, given, every)
            launches(every)
    if recording():
        record_cost(a.nbytes + b.nbytes + out.nbytes, 2 * a.shape[0] * _products(mixing))
    return out


@functools.lru_cache(maxsize=1024)
def _recipe(
    mixing: Mixing,
    result: str,
    rows: int,
    parts: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: bool,
    kinds: int | None,
) -> _MixRecipe:
    """What follows from these arguments; launches keep machine code of one dtype and device."""
    width = mixing.width(result)
    shape: tuple[int, ...] = (rows, width)
    if result == "w" and (shared or kinds is not None):
        shape = (width,) if kinds is None else (kinds, width)
    zero = not rows or uncovered(mixing, result)
    if not rows or not mixing.paths or kinds == 0:
        return _MixRecipe(shape, zero, Launches(()))
    if not shared and kinds is None:
        return _MixRecipe(shape, zero, Launches([_own(mixing, result, rows)]))
    if result == "w":
        count, launches = _outer(mixing, rows, parts, device, kinds)
        return _MixRecipe(shape, zero, launches, (count, weights(mixing)), True)
    numbers = (kinds or 1) * prepared(mixing, result) * max(1, parts)
    steps = _product(mixing, result, rows, parts, kinds, numbers * dtype.itemsize)
    return _MixRecipe(shape, zero, steps, (numbers,))


def _count(kinds: ElementRows | None) -> int | None:
    """Number of elements that have weights; None: all rows share one weight."""
    return None if kinds is None else kinds.starts.shape[0] - 1


def _product(
    mixing: Mixing, result: str, rows: int, parts: int, kinds: int | None, workspace_bytes: int
) -> Launches:
    """Launches of a product: its weights are prepared first."""
    found = merged(mixing, result)
    copies = max(group.block.copies for group in found)
    columns = max(run.block.copies for group in found for run in group.runs)
    tile = EXACT_TILE if parts == 2 else PRODUCT_TILE
    m, n, k = tile.blocks
    tile = tile._replace(blocks=(m, _block(copies, n), _block(columns, k)))
    m, n, _ = tile.blocks
    programs = sum(
        (-(-rows * group.block.components // m) + (kinds or 0)) * -(-group.block.copies // n)
        for group in found
    )
    product = generator.product_source(mixing, result, parts, kinds)
    prepare = generator.prepare_source(mixing, result, parts, kinds)
    (side,) = PREPARE_TILE.blocks
    tiles = (kinds or 1) * sum(
        -(-mixing.t[path.t].copies // side) * -(-mixing.z[path.z].copies // side)
        for path in mixing.paths
    )
    tables = () if kinds is None else (ORDER, STARTS)
    return Launches(
        [
            Step(_kernel("prepare", prepare, (), PREPARE_TILE), tiles, (B, SCRATCH)),
            Step(
                _kernel("product", product, (rows,), tile),
                programs,
                (*tables, A, SCRATCH, OUT),
                workspace_bytes=workspace_bytes,
            ),
        ]
    )


def _outer(
    mixing: Mixing, rows: int, parts: int, device: torch.device, kinds: int | None
) -> tuple[int, Launches]:
    """Pieces of the longest sum, and launches; the last piece of an element may not be full."""
    found = [(group.block, run.block) for group in merged(mixing, "z") for run in group.runs]
    tile, most = (EXACT_OUTER_TILE, EXACT_OUTER_PROGRAMS) if parts else (OUTER_TILE, OUTER_PROGRAMS)
    m, n, k = tile.blocks
    m = _block(max(t.copies for _, t in found), m, 64)
    n = _block(max(z.copies for z, _ in found), n)
    work = [(z.components, -(-t.copies // m) * -(-z.copies // n)) for z, t in found]
    share = rows * sum(c * tiles for c, tiles in work) // (most * processors(device))
    longest = max(c for c, _ in work)
    chunk = k * longest * max(1, -(-share // (k * longest)))
    more = kinds or 0
    programs = sum((-(-rows // (chunk // c)) + more) * tiles for c, tiles in work)
    count = -(-rows // (chunk // longest)) + more
    tile, numbers = tile._replace(blocks=(m, n, k)), (rows, chunk)
    folds = sum(-(-_size(mixing, path) // FOLD_TILE.blocks[1]) for path in mixing.paths)
    outer, fold = (
        generator.outer_source(mixing, parts, kinds),
        generator.fold_source(mixing, kinds),
    )
    tables = () if kinds is None else (ORDER, STARTS)
    steps = [
        Step(
            _kernel("outer", outer, numbers, tile),
            programs,
            (*tables, A, B, SCRATCH),
            workspace_bytes=4 * count * weights(mixing),
        ),
        Step(
            _kernel("fold", fold, numbers, FOLD_TILE),
            (kinds or 1) * folds,
            (*tables[1:], SCRATCH, OUT),
        ),
    ]
    return count, Launches(steps)


def _compile(
    mixing: Mixing, results: str, given: tuple[Any, ...], every: tuple[Tensor | None, ...]
) -> None:
    """Compile the kernels of some results together; training needs all three."""
    like, order, starts = (every[n] for n in (A, ORDER, STARTS))
    assert like is not None
    calls = []
    for result in results:
        recipe = _recipe(mixing, result, *given)
        between = like.new_empty(1, dtype=torch.float32) if recipe.wide else like
        alike = (like, like, order, starts, like, between)
        steps = recipe.launches.steps
        calls += [Call(step.kernel, [alike[n] for n in step.taken]) for step in steps]
    compile_together(calls)


def _own(mixing: Mixing, result: str, rows: int) -> Step:
    operands, source = (
        {"z": "tw", "t": "zw", "w": "tz"}[result],
        generator.own_source(mixing, result, OWN_WARPS),
    )
    places = {operands[0]: A, operands[1]: B, result: OUT}
    kernel = _kernel("own", source, (), Tile((OWN_WARPS,), OWN_WARPS, 1))
    return Step(kernel, rows, [places[slot] for slot in "tzw"])


def _kernel(name: str, source: str, numbers: tuple[int, ...], tile: Tile) -> Kernel:
    return Kernel(printed(f"o3_mixing_{name}", source, f"mixing_{name}"), numbers, (), tile)


def _block(count: int, most: int, least: int = 16) -> int:
    return min(most, max(least, 1 << max(count - 1, 0).bit_length()))


def _size(mixing: Mixing, path: Path) -> int:
    return mixing.t[path.t].copies * mixing.z[path.z].copies


def _products(mixing: Mixing) -> int:
    """Products of two numbers, in a row."""
    return sum(mixing.t[path.t].components * _size(mixing, path) for path in mixing.paths)


def _parts(x: Tensor) -> int:
    """Parts of each number for the tensor cores: one where torch allows TF32, 0 for 16 bits."""
    if x.dtype != torch.float32:
        return 0
    return 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2


class RowLayout(NamedTuple):
    """How a kernel is laid out.

    Args:
        height: copies u of a tile of weights.
        warps: of a program.
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

PAIRS_OF_A_KERNEL = 2
"""Pairs of x and y in a kernel, at most."""


class _RowJob(NamedTuple):
    """A kernel's work.

    Args:
        result: slots of what it computes.
        read: the call's tensors by operand, some to be added.
        to: the numbers of the call's results, one for each slot.
    """

    result: str
    read: Mapping[str, tuple[int, ...]]
    to: tuple[int, ...]


def run_mixed_rows(
    structure: Structure, mixing: Mixing, call: ContractionCall, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The results of a call, of contiguous tensors (rows, width)."""
    like, found = tensors[0], dict[int, Tensor]()
    rows, more = like.shape[0], list[tuple[int, Tensor]]()
    widths = dict(zip("xyzw", structure.widths[:2] + mixing.widths[1:], strict=True))
    queue = []
    for job in _jobs(call) if rows else ():
        values = {
            name: functools.reduce(torch.add, [tensors[t] for t in which])
            for name, which in job.read.items()
        }
        for slot, k in zip(job.result, job.to, strict=True):
            empty = _filled(structure, mixing, slot)
            to = (like.new_zeros if empty else like.new_empty)(rows, widths[slot])
            values[slot if job.result in "zw" else f"g{slot}"] = to
            if found.setdefault(k, to) is not to:
                more.append((k, to))
        pairs = sum(name[0] == "x" for name in job.read) if job.result in "zw" else 1
        launcher = _launcher(structure, mixing, job.result, pairs, rows, like.dtype, like.device)
        names = rows_source.operands(job.result, pairs)
        queue.append(Queued(launcher, [values[name] for name in names]))
    with current_device(like):
        launch_all(queue)
    for k, part in more:
        found[k] += part
    if recording():
        moved = sum(t.nbytes for launch in queue for t in launch.operands if t is not None)
        record_cost(moved, 2 * len(queue) * rows * _products(mixing))
    return [
        found[k] if k in found else like.new_zeros(rows, widths[slot])
        for k, (slot, _) in enumerate(call.results)
    ]


@functools.lru_cache(maxsize=1024)
def _jobs(call: ContractionCall) -> tuple[_RowJob, ...]:
    return (*_sums(call), *_gradients(call))


def _sums(call: ContractionCall) -> Iterator[_RowJob]:
    """Kernels of the results z and w."""
    for k, (slot, terms) in enumerate(call.results):
        if slot not in "zw":
            continue
        shared: dict[int, list[tuple[int, ...]]] = {}
        for *pair, other in terms:
            shared.setdefault(other, []).append(tuple(pair))
        for other, every in shared.items():
            for first in range(0, len(every), PAIRS_OF_A_KERNEL):
                pairs = enumerate(every[first : first + PAIRS_OF_A_KERNEL])
                read = {
                    f"{s}{i}": (t,) for i, pair in pairs for s, t in zip("xy", pair, strict=True)
                }
                yield _RowJob(slot, read | {"w" if slot == "z" else "z": (other,)}, (k,))


def _gradients(call: ContractionCall) -> Iterator[_RowJob]:
    """Kernels of the results x and y, one of each at a time."""
    jobs: dict[tuple[int, int, int], dict[str, tuple[int, list[int]]]] = {}
    for k, (slot, terms) in enumerate(call.results):
        if slot in "xy":
            nth = sum(result.slot == slot for result in call.results[:k])
            for factor, z, w in terms:
                jobs.setdefault((z, w, nth), {}).setdefault(slot, (k, []))[1].append(factor)
    for (z, w, _), wanted in jobs.items():
        slots = "".join(s for s in "xy" if s in wanted)
        read = {f"{'yx'['xy'.index(s)]}0": tuple(wanted[s][1]) for s in slots}
        yield _RowJob(slots, read | {"z": (z,), "w": (w,)}, tuple(wanted[s][0] for s in slots))


@functools.lru_cache(maxsize=1024)
def _launcher(
    structure: Structure,
    mixing: Mixing,
    result: str,
    pairs: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launcher:
    """A launcher keeps compiled code, so that the dtype is part of what it is known by."""
    layout = ROW_LAYOUTS[result[0]]
    source = rows_source.source(structure, mixing, result, pairs, layout.height)
    tile = Tile((layout.warps,), layout.warps, 1)
    kernel = printed("o3_mixed", source, rows_source.NAME)
    return Launcher(kernel, rows, (), (), (), tile)


@functools.lru_cache(maxsize=1024)
def _filled(structure: Structure, mixing: Mixing, slot: str) -> bool:
    """Whether some numbers of a row belong to no path."""
    if slot in "zw":
        return uncovered(mixing, slot)
    return rows_source.reached(structure, mixing, slot) < structure.width(slot)
