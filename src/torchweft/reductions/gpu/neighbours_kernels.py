"""Kernels of exact nearest neighbours: bounds of groups, of rows, distances; points in cells.

Tile by tile a thread of a product has 2 neighbouring columns of each 8, in one of 4 places: these
are a group.  Groups 4 t to 4 t + 3 belong to the t-th run of tiles.
"""

# ruff: noqa: N803
# mypy: ignore-errors

import triton
import triton.language as tl

from torchweft.reductions.gpu.kernels import empty_lists, insert, store_sorted

WIDTH = 256
"""Groups that are looked at together."""

TOGETHER = tl.constexpr(WIDTH)


@triton.jit(do_not_specialize=["rows", "columns", "parts", "length", "pitch"])
def lows_kernel(
    x_ptr, y_ptr, b_ptr, guard_ptr, lows_ptr, rows, columns, parts, length, pitch,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """lows[i, g] = min over j in group g of ⟨x_i, y_j⟩ + b_j.

    x, y, b  # (rows, WIDTH), (columns, WIDTH), (columns,) or None: whole runs of columns
    lows     # (whole tiles of rows, pitch)
    """
    if tl.load(guard_ptr) == 0:
        return
    run: tl.constexpr = TILES * BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    i = pid // parts * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    lanes = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + tl.minimum(i, rows - 1)[:, None] * WIDTH + k[None, :])
    lows_ptr += i[:, None] * pitch + tl.arange(0, 4)[None, :]
    first = pid % parts * length
    for begin in range(first, tl.minimum(first + length, columns), run):
        low = tl.full([BLOCK_M, 4], float("inf"), tl.float32)
        for start in range(begin, begin + run, BLOCK_N):
            at = tl.cast(start, tl.int64)
            y = tl.load(y_ptr + at * WIDTH + lanes[None, :] * WIDTH + k[:, None])
            s = tl.dot(x, y)
            if b_ptr is not None:
                s += tl.load(b_ptr + at + lanes)[None, :]
            s = tl.reshape(s, [BLOCK_M, BLOCK_N // 8, 4, 2])
            low = tl.minimum(low, tl.min(tl.min(s, 3), 1))
        tl.store(lows_ptr + begin // run * 4, low)


@triton.jit(do_not_specialize=["blocks", "k"])
def bounds_kernel(lows_ptr, slack_ptr, guard_ptr, bounds_ptr, counts_ptr, blocks, k):
    """bounds[i] = slack_i + the k-th least of lows[i], or a little more; how many are below it.

    lows  # (rows, blocks · TOGETHER)
    Only the least of all lows that are TOGETHER apart is compared, so the k-th may be missed.
    """
    if tl.load(guard_ptr) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TOGETHER)
    lows_ptr += row * (blocks * TOGETHER) + lanes
    best = tl.full([TOGETHER], float("inf"), tl.float32)
    for block in range(blocks):
        best = tl.minimum(best, tl.load(lows_ptr + block * TOGETHER))
    for _ in range(1, k):
        best = tl.where(lanes == tl.argmin(best, 0), float("inf"), best)
    bound = tl.min(best, 0) + tl.load(slack_ptr + row)
    count = tl.zeros([TOGETHER], tl.int32)
    for block in range(blocks):
        count += (tl.load(lows_ptr + block * TOGETHER) <= bound).to(tl.int32)
    tl.store(bounds_ptr + row, bound)
    tl.store(counts_ptr + row, tl.sum(count, 0))


@triton.jit(do_not_specialize=["columns", "blocks"])
def nearest_kernel(
    u_ptr, v_ptr, lows_ptr, bounds_ptr, above_ptr, scale_ptr, guard_ptr, out_ptr, columns, blocks,
    DIM: tl.constexpr, STEP: tl.constexpr, K: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """out[i] = the K columns of least |u_i − v_j|², j in groups whose low is at most the bound.

    u, v  # (rows, DIM), (columns, DIM)
    The bound falls with the list's last entry.  Bounds are of distances times a scale.
    """
    if tl.load(guard_ptr) == 0:
        return
    last: tl.constexpr = 2147483647
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TOGETHER)
    members = tl.arange(0, TILES * BLOCK_N // 4)
    members = members // 2 * 8 + members % 2
    bound, above, scale = tl.load(bounds_ptr + row), tl.load(above_ptr + row), tl.load(scale_ptr)
    lows_ptr += row * (blocks * TOGETHER) + lanes
    best, index = empty_lists(1, KEPT, K, tl.float32, tl.int32)
    for block in range(blocks):
        low = tl.load(lows_ptr + block * TOGETHER)
        waiting = low <= bound
        while tl.max(waiting.to(tl.int32), 0) > 0:
            place = tl.min(tl.where(waiting, lanes, TOGETHER), 0)
            group = block * TOGETHER + place
            j = group // 4 * (TILES * BLOCK_N) + group % 4 * 2 + members
            f = _distances(u_ptr + row * DIM, v_ptr, tl.minimum(j, columns - 1), DIM, STEP)
            f = tl.where(j < columns, f, float("inf"))
            j = tl.where(j < columns, j, last)
            best, index = insert(best, index, f[None, None, :], j[None, None, :])
            bound = tl.minimum(bound, tl.max(tl.max(best, 1), 0) * scale - above)
            waiting = (low <= bound) & (lanes > place)
    at = row * K + tl.zeros([1, 1], tl.int64)
    store_sorted(best, index, out_ptr, out_ptr, at, at >= 0, 1, K, 0, False, False)


@triton.jit(do_not_specialize=["points", "runs"])
def look_kernel(
    x_ptr, y_ptr, order_ptr, starts_ptr, cells_ptr, runs_ptr, near_ptr, far_ptr, points, runs,
    DIM: tl.constexpr, K: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """near[i] = the K points of least |x_i − y_j|² in the cells around cells[i]; far[i]: the last.

    x, y    # (queries, DIM), (DIM, points): points in the order of their cells, which `order` has
    starts  # how many points there are before a cell
    runs    # from a query's cell to the middle one of each three that follow each other
    """
    last: tl.constexpr = 2147483647
    row = tl.program_id(0).to(tl.int64)
    points = tl.cast(points, tl.int64)  # two rows may have 2^31 of them
    lanes = tl.arange(0, LANES)
    cell = tl.load(cells_ptr + row)
    best, index = empty_lists(1, KEPT, K, tl.float32, tl.int32)
    for run in range(runs):
        middle = cell + tl.load(runs_ptr + run)
        first, end = tl.load(starts_ptr + middle - 1), tl.load(starts_ptr + middle + 2)
        for start in range(first, end, LANES):
            at = tl.minimum(start + lanes, end - 1)
            f = tl.zeros([LANES], tl.float32)
            for d in tl.static_range(DIM):
                difference = tl.load(x_ptr + row * DIM + d) - tl.load(y_ptr + d * points + at)
                f += difference * difference
            j = tl.load(order_ptr + at).to(tl.int32)
            inside = start + lanes < end
            f = tl.where(inside, f, float("inf"))
            j = tl.where(inside, j, last)
            best, index = insert(best, index, f[None, None, :], j[None, None, :])
    at = row * K + tl.zeros([1, 1], tl.int64)
    store_sorted(best, index, near_ptr, near_ptr, at, at >= 0, 1, K, 0, False, False)
    tl.store(far_ptr + row, tl.max(tl.max(best, 1), 0))


@triton.jit
def _distances(u_ptr, v_ptr, j, DIM: tl.constexpr, STEP: tl.constexpr):
    """Σ (u − v_j)², STEP components beside each other."""
    parts = tl.zeros([j.shape[0], STEP], tl.float32)
    v_ptr += j.to(tl.int64)[:, None] * DIM
    for first in tl.static_range(0, DIM, STEP):
        k = first + tl.arange(0, STEP)
        u = tl.load(u_ptr + k, mask=k < DIM, other=0.0)
        v = tl.load(v_ptr + k[None, :], mask=k[None, :] < DIM, other=0.0)
        parts += (u[None, :] - v) * (u[None, :] - v)
    return tl.sum(parts, 1)
