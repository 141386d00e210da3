"""Kernel maps against a dictionary of voxels: all geometries, d = 1 to 4, any coordinates.

Natively the torch code is held to the dictionary; in the interpreter, and on a GPU, the kernels
too, and then to the torch code bit for bit.  Adversarial boxes: products of ranges past 2⁶³, ends
of int32, huge batch numbers, edges where the key of a neighbour wraps into the next line.
Seen red with: a box one axis too wide, a walk that never advances, the mirrored table not reversed,
lowest stored without its complement, the last candidate of a stride left out, a block's highest
target left out, repeats not asked for, int32 columns compared with numbers outside of int32, a
search over no span that never ended; a box whose columns are not asked for, rows said to ascend,
columns of a table as the rows stand, bits of one line left out, a flag that stays up; a word of one
voxel alone, one written by each of its voxels, the last axis's ends not asked for, pairs of an
offset at the place of another's; places where rows are asked for at the opposite offset, lines that
are not searched left as they were; rows that are never asked about, a guess that is forgotten, rows
outside that have a cell, tiles made after the wait; a second word of a line that is not read or
read where it does not stand, the place of a word without voxels, cells between those of a dilated
line not counted, counts of earlier words left out, repeats that fill no place, words that stay.
"""

import copy
import functools
import importlib
import itertools
import math
import pathlib
import random

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies

from torchweft.core.backend import interpreted
from torchweft.errors import IndexRangeError, ShapeError
from torchweft.voxels.grid import Geometry, geometry
from torchweft.voxels.maps import coordinates as coordinates_module
from torchweft.voxels.maps import numba_path
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.kernel_map import KernelMap, Maps

pytestmark = pytest.mark.kernels

KERNELS = interpreted()
DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
EXAMPLES = 25 if KERNELS else 150

same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(autouse=KERNELS)
def kernels(monkeypatch):
    """In the interpreter the kernels serve CPU tensors, as they serve a GPU's."""
    with_kernels(monkeypatch, True)


@pytest.fixture(params=["searched", "half searched", "looked up"])
def found_by(request, monkeypatch):
    """Neighbours of few voxels are searched, of many a half in wide boxes; others are looked up."""
    for name in ("LEAST_MARKED", "LEAST_HALVED"):
        monkeypatch.setattr(map_launch, name, 2**40 if request.param == "searched" else 0)
    monkeypatch.setattr(
        map_launch, "MOST_CELLS_PER_VOXEL", 2**12 if request.param == "looked up" else 0
    )
    return request.param


def with_kernels(monkeypatch, serve: bool) -> None:
    for name in ("coordinates", "kernel_map", "packing"):
        module = importlib.import_module(f"torchweft.voxels.maps.{name}")
        monkeypatch.setattr(module, "kernels_serve", lambda device: serve)


# --- the dictionary ---------------------------------------------------------------------------


def expected(rows: list, spatial: tuple | None, shape: Geometry) -> tuple[dict, list]:
    """{offset: {output row: input row}} and the output rows, from the formulas of the contract."""
    at = {tuple(row): i for i, row in enumerate(rows)}
    offsets = shape.offsets()
    if shape.mode == "submanifold":
        pairs = {
            k: {
                o: at[found]
                for row, o in at.items()
                if (found := (row[0], *map(sum, zip(row[1:], offset, strict=True)))) in at
            }
            for k, offset in enumerate(offsets)
        }
        return pairs, rows
    size, met = shape.output_shape(spatial), []
    for row, q in at.items():
        for k, offset in enumerate(offsets):
            out = tuple(map(output_of, row[1:], offset, shape.stride, size, [shape.mode] * 4))
            if None not in out:
                met.append(((row[0], *out), k, q))
    outputs = sorted({out for out, *_ in met})
    place = {out: o for o, out in enumerate(outputs)}
    pairs = {k: {} for k in range(len(offsets))}
    for out, k, q in met:
        pairs[k][place[out]] = q
    return pairs, outputs


def output_of(q: int, offset: int, stride: int, size: int, mode: str) -> int | None:
    if mode == "transposed":
        o, rest = q * stride + offset, 0
    else:
        o, rest = divmod(q - offset, stride)
    return o if rest == 0 and 0 <= o < size else None


def build(voxels: Coordinates, shape: Geometry) -> KernelMap:
    """The map of voxels that share none with others."""
    return Maps().get(voxels, shape)


def check(found: KernelMap, rows: list, spatial: tuple | None) -> None:
    pairs, outputs = expected(rows, spatial, found.geometry)
    assert found.outputs.rows.tolist() == [list(row) for row in outputs]
    sources = torch.full((len(pairs), len(outputs)), -1, dtype=torch.int32)
    targets = torch.full((len(pairs), len(rows)), -1, dtype=torch.int32)
    for k, of_k in pairs.items():
        for o, q in of_k.items():
            sources[k, o], targets[k, q] = q, o
    same(found.sources, sources)
    same(found.targets, targets)


# --- any cloud, any geometry ------------------------------------------------------------------


@strategies.composite
def problems(draw, mode: str):
    """Voxels that cluster at corners of a box, and a geometry."""
    dim = draw(strategies.integers(1, 4))
    low, high = (0, 12) if mode != "submanifold" else draw(boxes())
    kernel = [draw(strategies.integers(1, 3 if dim == 4 else 5)) for _ in range(dim)]
    dilation = [draw(strategies.sampled_from((1, 1, 2, 3, 9))) for _ in range(dim)]
    stride, padding = [1] * dim, [0] * dim
    if mode != "submanifold":
        stride = [draw(strategies.integers(1, 4)) for _ in range(dim)]
        padding = [draw(strategies.integers(0, 3)) for _ in range(dim)]
    shape = geometry(dim, kernel, stride, padding, dilation, mode=mode)
    corners = [
        [draw(strategies.sampled_from((low, high - 3))) for _ in range(dim)]
        for _ in range(draw(strategies.integers(1, 2)))
    ]
    batches = draw(strategies.sampled_from(((0,), (0, 1, 3), (5, 2**31 - 1))))
    batches = batches if mode == "submanifold" else batches[:2]
    number = random.Random(draw(strategies.integers(0, 2**20)))
    cells = {
        (number.choice(batches), *(c + number.randrange(4) for c in number.choice(corners)))
        for _ in range(draw(strategies.integers(0, 40)))
    }
    rows = sorted(cells)
    if draw(strategies.booleans()):
        number.shuffle(rows)
    return rows, shape, (16,) * dim


@strategies.composite
def boxes(draw):
    """Ends of the coordinates: small, far apart, or those of int32."""
    return draw(
        strategies.sampled_from(((0, 6), (-3, 5), (-(2**31), 2**31 - 1), (-70_000, 70_000)))
    )


def coordinates(rows: list, dim: int, spatial: tuple | None = None) -> Coordinates:
    return Coordinates(torch.tensor(rows, dtype=torch.int64).reshape(-1, 1 + dim), spatial)


LOOPS = [False] if KERNELS else [True, False]
"""Whether numba serves, which no GPU has beside its kernels."""


@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: "numba" if loops else "torch")
@pytest.mark.parametrize("mode", ["submanifold", "strided", "transposed"])
def test_maps_are_those_of_a_dictionary(mode, loops, monkeypatch):
    monkeypatch.setattr(numba_path, "loops_serve", lambda device: loops)

    @hypothesis.settings(max_examples=EXAMPLES)
    @hypothesis.given(problems(mode))
    def holds(problem):
        rows, shape, spatial = problem
        given = None if mode == "submanifold" else spatial
        found = build(coordinates(rows, len(spatial), given), shape)
        check(found, rows, given)

    holds()


# --- adversarial keys -------------------------------------------------------------------------

ENDS = (-(2**31), -1, 0, 2**31 - 1)


@pytest.mark.parametrize(
    "axes",
    [
        (ENDS, ENDS, (0, 1)),  # 2⁶⁴ and more: several words
        ((0, 2**30), (0, 2**30), (0, 1, 6)),  # 2⁶² · 7, past 2⁶³
        ((0, 2**20), (0, 2**20), (0, 2**22 - 1, 2**22)),  # 2⁶²: just one word
        ((0, 1, 2), (0, 2**31 - 1)),  # neighbours in the next line's last place
        ((0, 1), (0, 1), (0, 2**29 - 1)),  # 2³¹ keys: int64, though every one is below
        ((0, 1), (0, 1), (0, 2**29 - 2)),  # just int32
        ((0, 1, 2, 3), (0, 1), (0, 1), (0, 1)),
    ],
)
@pytest.mark.parametrize("kernel", [3, 2, (1, 5)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_no_two_voxels_share_a_key(axes, kernel, shuffled):
    dim = len(axes)
    sizes = kernel if isinstance(kernel, int) else (*[kernel[0]] * (dim - 1), kernel[1])
    rows = list(itertools.product((0, 7), *axes))
    if shuffled:
        random.Random(0).shuffle(rows)
    found = build(coordinates(rows, dim), geometry(dim, sizes))
    check(found, rows, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_type_and_stride(dtype):
    rows = [(b, x, y) for b in (0, 1) for x in (0, 3, 4) for y in (1, 2, 100)]
    wide = torch.tensor(rows, dtype=dtype).T.contiguous().T
    check(build(Coordinates(wide), geometry(2, 3)), rows, None)


def test_keys_are_int32_only_where_they_fit():
    assert coordinates([(0, 0, 0), (0, 2**15, 2**15 - 3)], 2).packing.dtype == torch.int32
    assert coordinates([(0, 0, 0), (0, 2**16, 2**15)], 2).packing.dtype == torch.int64


# --- validation -------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("mode", ["submanifold", "strided", "transposed"])
def test_a_voxel_that_stands_twice_raises_with_the_first_map(mode, shuffled):
    rows = [(0, x, y) for x in range(9) for y in range(9)]
    if shuffled:
        random.Random(1).shuffle(rows)
    rows.insert(30, rows[29])
    voxels = coordinates(rows, 2)
    with pytest.raises(ShapeError, match=r"stands in rows 29 and 30 .* must be distinct\. Merge"):
        build(voxels, geometry(2, 3, mode=mode))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((0, 4, 9), r"axis 1 of coords has the value 9 but spatial_shape\[1\] is 9"),
        ((0, -1, 0), "axis 0 of coords has the value -1"),
        ((2, 0, 0), "the batch column of coords has the value 2 but batch_size is 2"),
        ((0, 2**40, 0), f"axis 0 of coords has the value {2**40}"),
        ((0, 0, -(2**63)), f"axis 1 of coords has the value {-(2**63)}"),
    ],
)
def test_a_voxel_outside_raises(row, text):
    rows = torch.tensor([(0, 0, 0), (1, 2, 3), row])
    with pytest.raises(IndexRangeError, match=text):
        Coordinates(rows, (5, 9), 2).rows  # noqa: B018


# --- a box that is given ----------------------------------------------------------------------


def boxed(rows, dtype=torch.int32) -> Coordinates:
    """Voxels in a box of 6 · 7 · 9 cells, which is known before they are."""
    return Coordinates(torch.tensor(rows, dtype=dtype), (6, 7, 9), 3)


def cells(shuffled: bool) -> list:
    number = random.Random(3)
    rows = [
        r
        for r in itertools.product(range(3), range(6), range(7), range(9))
        if number.random() < 0.2
    ]
    if shuffled:
        number.shuffle(rows)
    return rows


def thought(ascend: bool) -> None:
    """What rows in the box are taken to do until they are read."""
    coordinates_module.packing_of((3, 6, 7, 9)).ascended = ascend


needs_kernels = pytest.mark.skipif(
    not KERNELS and not torch.cuda.is_available(), reason="needs the kernels"
)


@needs_kernels
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kernel", [3, 2])
def test_rows_that_do_what_others_did_not_are_built_again(kernel, shuffled, monkeypatch):
    """Once: the next rows in the box are thought to do the same."""
    built = []
    build_by_kernels = map_launch.submanifold
    monkeypatch.setattr(
        map_launch, "submanifold", lambda *given: built.append(1) or build_by_kernels(*given)
    )
    thought(shuffled)
    rows, device = cells(shuffled), "cpu" if KERNELS else "cuda"
    for times in (2, 3):
        voxels = Coordinates(torch.tensor(rows, device=device), (6, 7, 9), 3)
        found = build(voxels, geometry(3, kernel))
        assert len(built) == times
        assert (voxels.order is None) == (not shuffled)
        if KERNELS:
            check(found, rows, None)
    voxels = Coordinates(torch.tensor(cells(not shuffled), device=device), (6, 7, 9), 3)
    voxels.rows.sum()  # asked for before a map: nothing is built in vain
    build(voxels, geometry(3, kernel))
    assert len(built) == 4


@needs_kernels
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_host_waits_when_all_is_queued(shuffled, found_by, monkeypatch):
    """A map and its tiles; the flags are read once, and before the map is handed out."""
    from torchweft.core.gpu.launcher import Kernel

    log, launch, read = [], Kernel.__call__, map_launch.Flags.read
    thought(not shuffled)
    monkeypatch.setattr(
        Kernel, "__call__", lambda k, *a: log.append(k._kernel.__name__) or launch(k, *a)
    )
    monkeypatch.setattr(map_launch.Flags, "read", lambda f: log.append("read") or read(f))
    rows = torch.tensor(cells(shuffled), device="cpu" if KERNELS else "cuda")
    found = build(Coordinates(rows, (6, 7, 9), 3), geometry(3, 3))
    steps = ["settle"] * shuffled + ["search"]
    if found_by == "looked up":
        steps = [*(["take", "count", "number", "arrange"] if shuffled else ["mark"]), "look"]
    if found_by == "half searched":
        steps.append("mask")
    steps = ["pack", *steps, "key", "scan", "rank", "list", "turn"]
    assert log == [*(f"{step}_kernel" for step in steps), "read"]
    log.clear()
    assert found.inputs.rows.shape == rows.shape
    assert (found.inputs.order is None) == (not shuffled)
    assert log == []


@pytest.mark.usefixtures("found_by")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kernel", [3, 2])
def test_a_box_that_is_given_gives_the_same_map(kernel, shuffled, dtype):
    thought(not shuffled)
    rows = cells(shuffled)
    voxels = boxed(rows, dtype)
    found = build(voxels, geometry(3, kernel))
    check(found, rows, None)
    assert voxels.rows.dtype == torch.int32
    assert (voxels.order is None) == (not shuffled)


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("place", [0, 200, -1])
@pytest.mark.singly  # seconds an item in the interpreter
def test_a_voxel_outside_of_the_box_raises(column, below, place):
    rows = [list(row) for row in cells(False)]
    rows[place][column] = -1 if below else (3, 6, 7, 9)[column]
    with pytest.raises(IndexRangeError, match="of coords has the value"):
        boxed(rows).rows  # noqa: B018
    rows[place][column] = 2**40
    with pytest.raises(IndexRangeError, match=f"has the value {2**40}"):
        build(boxed(rows, torch.int64), geometry(3, 3))
    check(build(boxed(cells(False)), geometry(3, 3)), cells(False), None)  # it is forgotten


@pytest.mark.skipif(not KERNELS, reason="without kernels, coordinates are read when they are given")
def test_a_voxel_outside_of_the_box_is_not_forgotten_when_it_is_overwritten():
    """Red before: the keys of the first values, with the rows of the second."""
    rows = torch.tensor(cells(False))
    rows[5, 2] = 2**32
    voxels = Coordinates(rows, (6, 7, 9), 3)
    rows[5, 2] = 0
    with pytest.raises(
        IndexRangeError, match=r"outside of .*\(6, 7, 9\).* written to since: .* Corr"
    ):
        build(voxels, geometry(3, 3))


@pytest.mark.parametrize("change", [copy.deepcopy, lambda c: c.to("cpu")])
@pytest.mark.parametrize("wrong", [False, True])
def test_copies_are_made_of_what_is_known(change, wrong):
    """They would wait for kernels that are none of theirs."""
    thought(not wrong)
    voxels = boxed(cells(True))
    for one in (voxels, change(voxels)):
        check(build(one, geometry(3, 2)), cells(True), None)
    with pytest.raises(IndexRangeError, match="axis 0 of coords has the value 9"):
        change(boxed([*cells(True), [0, 9, 0, 0]]))


@pytest.mark.skipif(not KERNELS, reason="needs the interpreter, which sees what they touch")
@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("below", [False, True])
def test_kernels_that_run_before_it_raises_pass_it_over(column, below, monkeypatch):
    """They would write and read past the words of cells."""
    for name, number in (("LEAST_MARKED", 0), ("MOST_CELLS_PER_VOXEL", 2**12)):
        monkeypatch.setattr(map_launch, name, number)
    thought(False)
    rows = [list(row) for row in cells(True)[:60]]
    rows[20][column] = -1 if below else (3, 6, 7, 9)[column]
    voxels = boxed(rows)
    for _ in range(2):
        with pytest.raises(IndexRangeError, match="of coords has the value"):
            build(voxels, geometry(3, 3))


@pytest.mark.parametrize("place", [0, 130, -1])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.singly  # seconds an item in the interpreter
def test_a_voxel_that_stands_twice_in_the_box_raises(place, shuffled, marked, monkeypatch):
    for name, number in (("LEAST_MARKED", 0), ("MOST_CELLS_PER_VOXEL", 2**12)) if marked else ():
        monkeypatch.setattr(map_launch, name, number)
    thought(False)
    rows = cells(shuffled)
    rows.insert(place, rows[place])
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"1 rows repeat another"):
            build(boxed(rows), geometry(3, 3))
    check(build(boxed(cells(shuffled)), geometry(3, 3)), cells(shuffled), None)


@needs_kernels
@pytest.mark.singly  # two minutes each in the interpreter
@pytest.mark.parametrize("side", [64, 63])
@pytest.mark.parametrize("guessed", [False, True])
def test_marked_cells_give_the_order_of_a_sort(side, guessed, monkeypatch):
    """Of cells in several blocks, in the first and in the last; the words go with the first map."""
    for name, number in (("LEAST_MARKED", 0), ("MOST_CELLS_PER_VOXEL", 2**12)):
        monkeypatch.setattr(map_launch, name, number)
    number = random.Random(5)
    drawn = {tuple(number.randrange(side) for _ in range(3)) for _ in range(500)}
    rows = [(0, *row) for row in drawn | {(0, 0, 0), (side - 1,) * 3}]
    number.shuffle(rows)
    voxels = torch.tensor(rows, device="cpu" if KERNELS else "cuda")
    box = (side,) * 3
    coordinates_module.packing_of((1, *box)).ascended = False
    found = Coordinates(voxels, box, 1) if guessed else Coordinates(voxels)
    for shape in (geometry(3, (3, 1, 5)), geometry(3, (1, 3, 3), dilation=(1, 1, 2))):
        table = build(found, shape)
        assert found.cells() is None
        if KERNELS:
            check(table, rows, None)
    keys = ((voxels[:, 1] * side + voxels[:, 2]) * side + voxels[:, 3]).int()
    wanted, order = torch.sort(keys)
    same(found.keys, wanted)
    same(found.order, order.int())


@pytest.mark.parametrize("layer", [(3, "submanifold"), (2, "submanifold"), (2, "strided")])
def test_columns_of_a_table_ascend_whatever_the_rows_do(layer):
    kernel, mode = layer
    rows = cells(True)
    found = build(boxed(rows), geometry(3, kernel, 1, mode=mode))
    inputs, outputs = (found.inputs.order, found.outputs.order)
    back = found.transpose().table
    for table, whole, order in (
        (found.table, found.sources, outputs),
        (back, found.targets, inputs),
    ):
        same(table, whole if order is None else whole[:, order.long()])


@pytest.mark.skipif(not KERNELS and not torch.cuda.is_available(), reason="needs the kernels")
@pytest.mark.parametrize("kernel", [3, 2, (1, 5, 5), (3, 1, 1), 1])
def test_the_search_leaves_the_bits_of_what_it_finds(kernel, found_by, monkeypatch):
    from torchweft.voxels.maps.gpu import tiles as preparation

    left = []
    thought(False)
    monkeypatch.setattr(map_launch, "tiles_of", lambda *given: left.append(given[3].parts))
    device = "cpu" if KERNELS else "cuda"
    voxels = Coordinates(torch.tensor(cells(True), device=device), (6, 7, 9), 3)
    found = build(voxels, geometry(3, kernel))
    (parts,) = left
    if found_by == "half searched" and found.back is None:
        assert parts is None  # a row does not know all who find it
        return
    joined = functools.reduce(torch.bitwise_or, parts)
    made = preparation.tiles_of(found.table, None, len(found.table))
    same(joined, made.masks[: len(joined)])


@pytest.mark.skipif(not KERNELS and not torch.cuda.is_available(), reason="needs the kernels")
@pytest.mark.parametrize("kernel", [3, 2, (3, 5, 5)])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("few", [0, 2**14])
@pytest.mark.singly  # seconds an item in the interpreter
def test_what_is_prepared_names_every_pair_once(kernel, shuffled, mirrored, few, monkeypatch):
    """Panels and lists of pairs against the map itself; masks in parts, and of three words.

    Of a mirrored table half of the pairs are listed; of many rows, with no room for more.
    """
    from torchweft.voxels.maps.gpu import tiles as preparation

    monkeypatch.setattr(preparation, "MOST_RANKED", few)
    device = "cpu" if KERNELS else "cuda"
    voxels = Coordinates(torch.tensor(cells(shuffled), device=device), (6, 7, 9), 3)
    found = build(voxels, geometry(3, kernel))
    if mirrored and found.back is not None:
        pytest.skip("a table that is not mirrored")
    num, count = found.table.shape
    table = found.kept if mirrored else found.table
    made = preparation.tiles_of(table, voxels.order, num)
    pairs = preparation.pairs_of(table, voxels.order, num, mirrored)
    totals = pairs.totals[:num].long()
    same(totals, found.counts)

    place = voxels.order.long() if shuffled else torch.arange(count, device=device)
    listed = found.table[: num // 2 + 1] if mirrored else found.table
    k, i = (listed >= 0).nonzero().unbind(1)  # offset by offset, in canonical order
    room = listed.numel() if few else len(k)
    assert len(pairs.inputs) == len(pairs.outputs) == room + -room % 8
    assert pairs.inputs.dtype == (torch.int16 if few and mirrored else torch.int32)
    same(pairs.inputs[: len(k)].int(), found.table[k, i])
    same(pairs.outputs[: len(k)].long(), place[i])
    if mirrored:  # those of the offsets above, in their order
        above, i = (found.table[num // 2 :].flip(0) >= 0).nonzero().unbind(1)
        same(above, k)
        same(pairs.inputs[: len(k)].long(), place[i])
        same(pairs.outputs[: len(k)].int(), found.table[num - 1 - above, i])

    rows = made.rows.view(-1, 128)
    lists = made.lists[: rows.numel() * num].view(-1, num, 128)
    same(made.rows[made.rows >= 0].sort().values.long(), torch.arange(count, device=device))
    for row, entries in zip(rows, lists, strict=True):
        live = row >= 0
        sources = found.sources[:, row[live].long()]
        needed = (sources >= 0).any(1)
        same(entries[needed][:, live], sources[needed])


# --- the same bits as the torch code ----------------------------------------------------------

WAYMO, BITS = "waymo_spconv_benchmark-pc.npz", "semantickitti_001705.ssc.bin"
NUMBERS = {"kitti_000008.bin": 4, "nuscenes_lidar_top.bin": 5, "sunrgbd_000017.bin": 6}
"""Numbers of a point in each file."""


def voxelise(points, size: float) -> torch.Tensor:
    """Points in metres to distinct voxels with a batch column, ascending."""
    p = torch.as_tensor(points)[:, :3]
    cells = torch.unique(torch.floor((p - p.amin(0)) / size).int(), dim=0)
    return torch.cat([torch.zeros_like(cells[:, :1]), cells], 1)


@functools.cache
def cloud(name: str) -> torch.Tensor:
    if name == "sphere":
        grid = torch.cartesian_prod(*[torch.arange(16)] * 3)
        radius = (grid - 7.5).square().sum(1).sqrt()
        shell = grid[(radius <= 8) & (radius >= 6.75)].int()
        return torch.cat([torch.zeros_like(shell[:, :1]), shell], 1)
    path = DATA / name
    if not path.exists():
        pytest.skip(f"needs the point cloud {name}")
    if path.suffix == ".npz":
        return voxelise(np.load(path)["pc"], 0.05)
    if name == BITS:
        at = torch.from_numpy(np.unpackbits(np.fromfile(path, np.uint8))).nonzero()[:, 0].int()
        return torch.stack([0 * at, at // 8192, at // 32 % 256, at % 32], 1)
    return voxelise(np.fromfile(path, np.float32).reshape(-1, NUMBERS[name]), 0.05)


CLOUDS = ["sphere"] if KERNELS else ["sphere", "kitti_000008.bin", "nuscenes_lidar_top.bin", WAYMO]
LAYERS = {
    "3³": {"kernel_size": 3},
    "2³": {"kernel_size": 2},
    "(3, 1, 5), dilated": {"kernel_size": (3, 1, 5), "dilation": (1, 2, 3)},
    "(1, 3, 4), dilated": {"kernel_size": (1, 3, 4), "dilation": (1, 1, 2)},
    "3³, stride 2": {"kernel_size": 3, "stride": 2, "padding": 1, "mode": "strided"},
    "2³, stride 2": {"kernel_size": 2, "stride": 2, "mode": "strided"},
    "2³, transposed": {"kernel_size": 2, "stride": 2, "mode": "transposed"},
}


@pytest.mark.usefixtures("found_by")
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.singly  # seconds an item in the interpreter
def test_kernels_give_the_bits_of_the_torch_code(name, layer, shuffled, monkeypatch):
    voxels = cloud(name)
    if interpreted():
        voxels = voxels[:900]
    elif not torch.cuda.is_available():
        pytest.skip("needs a GPU, or the interpreter")
    if shuffled:
        voxels = voxels[torch.randperm(len(voxels), generator=torch.Generator().manual_seed(0))]
    shape = geometry(3, **LAYERS[layer])
    found = build(Coordinates(voxels.to("cpu" if interpreted() else "cuda")), shape)
    with_kernels(monkeypatch, False)
    wanted = build(Coordinates(voxels), shape)
    for side in ("sources", "targets"):
        same(getattr(found, side).cpu(), getattr(wanted, side))
    same(found.outputs.rows.cpu(), wanted.outputs.rows)
    same(found.outputs.keys.cpu(), wanted.outputs.keys)


@pytest.mark.skipif(KERNELS, reason="searches whole clouds: too many programs to interpret")
@pytest.mark.parametrize("name", ["sphere", *NUMBERS, BITS, WAYMO])
def test_pairs_of_real_clouds(name):
    """Every pair is one offset apart, as many as a search for each offset finds."""
    voxels = cloud(name)
    found = build(Coordinates(voxels), geometry(3, 3))
    rows = voxels.long()
    for k, offset in enumerate(found.offsets.tolist()):
        inputs, outputs = found.pairs(k)
        same(rows[inputs] - rows[outputs], torch.tensor([0, *offset]).expand(len(inputs), 4))
    same(found.counts, found.counts.flip(0))
    occupied = {tuple(row) for row in voxels[:, 1:].tolist()}
    total = sum(
        (x + i, y + j, z + k) in occupied
        for x, y, z in occupied
        for i, j, k in itertools.product((-1, 0, 1), repeat=3)
    )
    assert int(found.counts.sum()) == total


@pytest.mark.skipif(KERNELS, reason="searches whole clouds: too many programs to interpret")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", [*NUMBERS, BITS])
def test_layers_of_real_clouds_are_those_of_a_dictionary(name, layer):
    voxels, shape = cloud(name), geometry(3, **LAYERS[layer])
    spatial = None
    if shape.mode != "submanifold":
        spatial = tuple(n + 1 for n in voxels[:, 1:].amax(0).tolist())
    found = build(Coordinates(voxels, spatial, 1 if spatial else None), shape)
    check(found, voxels.tolist(), spatial)


def test_row_order_carries_no_information():
    voxels = cloud("sphere")[:300]
    order = torch.randperm(len(voxels), generator=torch.Generator().manual_seed(1))
    first = build(Coordinates(voxels), geometry(3, 3))
    second = build(Coordinates(voxels[order]), geometry(3, 3))
    back = torch.cat([order, torch.tensor([-1])])
    renamed = torch.empty_like(first.sources).index_copy_(
        1, order, back[second.sources.long()].int()
    )
    same(renamed, first.sources)


def test_empty_clouds():
    for mode in ("submanifold", "strided", "transposed"):
        found = build(coordinates([], 3, (4, 4, 4)), geometry(3, 3, mode=mode))
        assert found.sources.shape == found.targets.shape == (27, 0)
        assert math.prod(found.sources.shape) == 0
