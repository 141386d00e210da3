"""Launches of the kernels of weights that mix copies."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from weft.core.explain import record_cost, recording
from weft.core.generated import printed
from weft.core.launcher import (
    Call,
    Launcher,
    Tile,
    compile_together,
    current_device,
    processors,
)
from weft.o3 import mixing_generator as generator
from weft.o3.mixing_kinds import Kinds
from weft.o3.mixing_plan import Mixing, Path, merged, prepared, uncovered, weights

__all__ = ["run"]

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
"""Of the program of a row with weights of its own."""

OUTER_PROGRAMS, EXACT_OUTER_PROGRAMS = 4, 24
"""Programs for each processor that share the sum over rows; of exact ones four to six run together.
"""


def run(
    mixing: Mixing, result: str, a: Tensor, b: Tensor, shared: bool, kinds: Kinds | None = None
) -> Tensor:
    """The result z of (t, w), t of (z, w) or w of (t, z): contiguous rows of mixings' widths."""
    rows, width, count = a.shape[0], mixing.width(result), _count(kinds)
    shape: tuple[int, ...] = (rows, width)
    if result == "w" and (shared or kinds is not None):
        shape = (width,) if kinds is None else (count, width)
    filled = not rows or uncovered(mixing, result)
    out = (a.new_zeros if filled else a.new_empty)(shape)
    if not rows or not mixing.paths or not count:
        return out
    with current_device(a):
        if not shared and kinds is None:
            _own(mixing, result, a, b, out)
        elif result == "w":
            _outer(mixing, a, b, out, kinds)
        else:
            _product(mixing, result, a, b, out, kinds)
    if recording():
        record_cost(a.nbytes + b.nbytes + out.nbytes, 2 * rows * _products(mixing))
    return out


def _count(kinds: Kinds | None) -> int:
    """Of kinds that weights are given for; one, if all rows have the same."""
    return 1 if kinds is None else kinds.starts.shape[0] - 1


def _product(
    mixing: Mixing, result: str, a: Tensor, weight: Tensor, out: Tensor, kinds: Kinds | None
) -> None:
    parts, count = _parts(a), _count(kinds)
    matrices = weight.new_empty(count * prepared(mixing, result) * max(1, parts))
    prepare, product = _product_launchers(
        mixing, result, a.shape[0], parts, a.dtype, a.device, None if kinds is None else count
    )
    if not product.kernel.compiled:
        trained = a.requires_grad or weight.requires_grad
        _compile(mixing, "tzw" if trained else result, a, kinds)
    prepare([weight, matrices])
    product([*(kinds or ()), a, matrices, out], matrices.nbytes)


@functools.lru_cache(maxsize=1024)
def _product_launchers(
    mixing: Mixing,
    result: str,
    rows: int,
    parts: int,
    dtype: torch.dtype,
    device: torch.device,
    kinds: int | None,
) -> tuple[Launcher, Launcher]:
    """Of one dtype and device, whose machine code a launcher keeps."""
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
    return (
        _launcher("prepare", prepare, tiles, (), PREPARE_TILE),
        _launcher("product", product, programs, (rows,), tile),
    )


def _outer(mixing: Mixing, t: Tensor, z: Tensor, out: Tensor, kinds: Kinds | None) -> None:
    count, outer, fold = _outer_launchers(
        mixing, t.shape[0], _parts(t), t.dtype, t.device, None if kinds is None else _count(kinds)
    )
    partial = t.new_empty((count, weights(mixing)), dtype=torch.float32)
    if not outer.kernel.compiled:
        _compile(mixing, "w", t, kinds)
    outer([*(kinds or ()), t, z, partial], partial.nbytes)
    fold([*(kinds or ())[1:], partial, out])


@functools.lru_cache(maxsize=1024)
def _outer_launchers(
    mixing: Mixing,
    rows: int,
    parts: int,
    dtype: torch.dtype,
    device: torch.device,
    kinds: int | None,
) -> tuple[int, Launcher, Launcher]:
    """And how many pieces the longest sum has; every kind may end in a piece that is not full."""
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
    return (
        count,
        _launcher("outer", outer, programs, numbers, tile),
        _launcher("fold", fold, (kinds or 1) * folds, numbers, FOLD_TILE),
    )


def _compile(mixing: Mixing, results: str, like: Tensor, kinds: Kinds | None) -> None:
    """The kernels of some results at once; who trains will need those of all three."""
    count = None if kinds is None else _count(kinds)
    given = (like.shape[0], _parts(like), like.dtype, like.device, count)
    tables, partial = list(kinds or ()), like.new_empty(1, dtype=torch.float32)
    calls = []
    for result in results:
        if result == "w":
            _, outer, fold = _outer_launchers(mixing, *given)
            calls.append(Call(outer.kernel, [*tables, like, like, partial]))
            calls.append(Call(fold.kernel, [*tables[1:], partial, like]))
        else:
            prepare, product = _product_launchers(mixing, result, *given)
            calls.append(Call(prepare.kernel, [like, like]))
            calls.append(Call(product.kernel, [*tables, like, like, like]))
    compile_together(calls)


def _own(mixing: Mixing, result: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    values = dict(zip({"z": "tw", "t": "zw", "w": "tz"}[result], (a, b), strict=True))
    values[result] = out
    operands = [values[slot] for slot in "tzw"]
    _own_launcher(mixing, result, a.shape[0], a.dtype, a.device)(operands)


@functools.lru_cache(maxsize=1024)
def _own_launcher(
    mixing: Mixing, result: str, rows: int, dtype: torch.dtype, device: torch.device
) -> Launcher:
    """A launcher keeps compiled code, so that the dtype is part of what it is known by."""
    source = generator.own_source(mixing, result, OWN_WARPS)
    return _launcher("own", source, rows, (), Tile((OWN_WARPS,), OWN_WARPS, 1))


def _launcher(
    name: str, source: str, programs: int, numbers: tuple[int, ...], tile: Tile
) -> Launcher:
    return Launcher(
        printed(f"o3_mixing_{name}", source, f"mixing_{name}"), programs, (), numbers, (), tile
    )


def _block(count: int, most: int, least: int = 16) -> int:
    return min(most, max(least, 1 << max(count - 1, 0).bit_length()))


def _size(mixing: Mixing, path: Path) -> int:
    return mixing.t[path.t].copies * mixing.z[path.z].copies


def _products(mixing: Mixing) -> int:
    """Of numbers, in a row."""
    return sum(mixing.t[path.t].components * _size(mixing, path) for path in mixing.paths)


def _parts(x: Tensor) -> int:
    """Of each number, for the tensor cores; one where torch allows TF32."""
    if x.dtype != torch.float32:
        return 0
    return 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2
