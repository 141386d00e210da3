"""Tiles and pairs of several tables at once are those of each table, bit for bit.

Seen red with: the number of a job left out of the keys, columns past the last sorted before others,
a panel's place in its own table mistaken for that among all; totals of one table where another's
are read, the pairs of all offsets of half a table.
"""

import pytest
import torch
from torch.nn.functional import pad

from torchweft.core.backend import interpreted
from torchweft.testing.contract import assert_same_bits
from torchweft.testing.sanitizer import reaching
from torchweft.voxels import SparseTensor, kernel_map
from torchweft.voxels.maps.gpu import jobs, tiles
from torchweft.voxels.maps.gpu.jobs import Job, PairJob
from torchweft.voxels.maps.gpu.tiles import PANEL, SearchRemains, Tiles, pairs_of, tiles_of

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not interpreted(), reason="in the interpreter kernels serve the CPU too"),
]


@pytest.fixture
def reached(monkeypatch):
    """The memory checker is told of tensors that kernels reach by their addresses."""
    with reaching() as tensors:
        reach(monkeypatch, tensors)
        yield tensors


def reach(monkeypatch, tensors):
    plain, plain_of_pairs = jobs._numbers, jobs._numbers_of_pairs

    def numbers(begin, job, tiles):
        given = *job[:2], job.left.rest, job.left.parts, *tiles[:3], *tiles.turns, *tiles[4:7]
        seen = tiles.seen and tiles.seen.tensor
        tensors.extend(t for t in (*given, seen) if t is not None)
        return plain(begin, job, tiles)

    def numbers_of_pairs(begin, job, tiles, pairs):
        given = *job[:2], *tiles[4:7], *pairs[:2]
        tensors.extend(t for t in given if t is not None)
        return plain_of_pairs(begin, job, tiles, pairs)

    monkeypatch.setattr(jobs, "_numbers", numbers)
    monkeypatch.setattr(jobs, "_numbers_of_pairs", numbers_of_pairs)


def job(offsets, count, half, ordered, parts):
    """A table with a row at a third of its entries, and what a search would leave."""
    generator = torch.Generator().manual_seed(count)
    table = torch.randint(-2 * count - 1, count + 1, (offsets, count), generator=generator).int()
    table = table.clamp(min=-1, max=count - 1)
    order = torch.randperm(count, generator=generator).int() if ordered else None
    bits = [(row >= 0).int() << k for k, row in enumerate(table[:32])]
    masks = [torch.stack(bits[n::parts]).sum(0).int() for n in range(parts)]
    left = SearchRemains(None, torch.stack(masks) if parts else None)
    if half:
        left.rest = table[offsets // 2 + 1 :].contiguous()
        table = table[: offsets // 2 + 1].contiguous()
    return Job(table, order, offsets, left)


def defined(tiles: Tiles, offsets: int, count: int) -> dict[str, torch.Tensor]:
    """What has a meaning of tiles whose tensors may be longer."""
    panels, words = -(-count // PANEL), -(-offsets // 32)
    halves = tiles.halves[: 2 * panels * words].view(panels, 2, words)
    bits = (halves[..., None] >> torch.arange(32)) & 1
    needed = bits.amax(1).flatten(1)[:, :offsets, None] != 0
    lists = tiles.lists[: panels * offsets * PANEL].view(panels, offsets, PANEL)
    return {
        "rows": tiles.rows[: panels * PANEL],
        "halves": halves,
        "lists": torch.where(needed, lists, 0),
        "turns": tiles.turns[0][: 2 * panels],
        "long turns": tiles.turns[1][:panels],
        "masks": tiles.masks.flatten()[: words * count],
        "starts": tiles.starts[: offsets * panels],
        "totals": tiles.totals[:offsets],
    }


KINDS = [(27, True, True, 2), (27, True, False, 1), (8, False, False, 0), (33, False, True, 0)]
KINDS += [(1, False, False, 0), (11, False, True, 0), (12, False, True, 0), (28, False, False, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_those_of_each_table(kind, reached):
    counts = 130, 1100, 5, 2, 3, 4  # numbers of jobs fill the bits of keys
    together = [job(kind[0], count, *kind[1:]) for count in counts]
    jobs.tiles_together(together)
    for count, (table, order, offsets, left, _) in zip(counts, together, strict=True):
        assert left.rest is left.parts is None
        found = defined(tiles_of(table, order, offsets), offsets, count)
        exact = defined(tiles_of(*job(kind[0], count, *kind[1:])), offsets, count)
        for name, tensor in found.items():
            assert_same_bits(tensor, exact[name], name)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("count", [1, 90, 1500])
def test_the_rest_of_half_a_table(ordered, count):
    """Seen red with: rows in the place of columns, offsets from the first."""
    generator = torch.Generator().manual_seed(count)
    coords = torch.randint(0, 12, (count, 3), generator=generator).unique(dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)] if ordered else coords
    tensor = SparseTensor(torch.ones(len(coords), 1), pad(coords, (1, 0)), (12, 12, 12), 1)
    found = kernel_map(tensor, 3)
    half, order = found.table[:14].contiguous(), found.outputs.order
    assert (order is not None) == (ordered and count > 1)
    rest = tiles.empty_rest(half, 27)
    tiles.fill_rest(half, order, rest)
    assert_same_bits(rest, found.table[14:], "rest")


def listed(pairs, offsets, mirrored):
    """What has a meaning of pairs whose tensors may be longer."""
    count = int(pairs.totals[: tiles.num_listed(offsets, mirrored)].sum())
    return pairs.inputs[:count], pairs.outputs[:count]


LISTS = [(KINDS[0], tiles.MOST_RANKED), (KINDS[0], 100), (KINDS[3], 100)]


@pytest.mark.parametrize(("kind", "ranked"), LISTS)
def test_pairs_are_those_of_each_table(kind, ranked, reached, monkeypatch):
    """Of few rows in int16, and of many, for whose numbers the host waits once."""
    for module in (tiles, jobs):
        monkeypatch.setattr(module, "MOST_RANKED", ranked)
    waited, plain = [], tiles.Flags.read
    monkeypatch.setattr(tiles.Flags, "read", lambda f: waited.append(f) or plain(f))
    counts, mirrored = (130, 300, 5), kind[1]
    together = [job(kind[0], count, *kind[1:]) for count in counts]
    jobs.tiles_together(together)
    jobs.pairs_together([PairJob(*given[:3], mirrored) for given in together])
    assert len(set(waited)) == (ranked < 300)
    assert all(tiles._pair_cache.keeps(given[:2], mirrored) for given in together)
    lists = [pairs_of(*given[:3], mirrored) for given in together]
    tiles._pair_cache._entries.clear()
    for count, given, pairs in zip(counts, together, lists, strict=True):
        found, again = pairs, pairs_of(*given[:3], mirrored)
        assert again is not found
        exact = listed(again, kind[0], mirrored)
        for one, another in zip(listed(found, kind[0], mirrored), exact, strict=True):
            assert one.dtype == (torch.int16 if mirrored and count <= ranked else torch.int32)
            assert_same_bits(one, another, f"{count} columns")


def test_kinds_are_kept_apart_and_a_launch_has_eight_tables_at_most(reached, monkeypatch):
    made = []
    monkeypatch.setattr(jobs, "_make", lambda group: made.append(len(group)))
    tables = [job(3, 4, False, False, 0) for _ in range(9)]
    others = [job(3, 4, False, True, 0), job(1, 4, False, True, 0), job(1, 4, False, True, 1)]
    wide = [job(60, 4, False, True, 0) for _ in range(2)]  # more offsets than bits of a key
    jobs.tiles_together([*tables, *others, *wide, job(3, 0, False, False, 0)])
    assert made == [8]
    for table, order, *_ in (tables[-1], *others, *wide):
        assert tiles._tile_cache.keeps((table, order), None)
