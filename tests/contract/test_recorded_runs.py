"""Runs that a CUDA graph replays: plans of tables are made in the run, and the host reads nothing.

Here the CPU computes each run; what only a GPU shows is in tests/integration/test_capture_gpu.py.
"""

import sys

import pytest
import torch

import torchweft
from tests.conftest import BACKENDS
from tests.nearness import same
from tests.regressions import test_changed_tables as changed
from torchweft import o3, products
from torchweft.core import recorded, table_copies
from torchweft.core.tables import cut
from torchweft.o3.radial_linear import operator as radial_linear
from torchweft.o3.sorting import rows as sorting
from torchweft.voxels.maps.gpu import tiles

pytestmark = pytest.mark.kernels

CALLS = [call for call in changed.CALLS if call is not changed._largest]
READS = ("item", "tolist", "__int__", "__bool__", "__float__", "nonzero", "cpu", "numpy")
ALLOWED = ("_check", "_check_segments", "check_ranges", "_checked_rows")
"""Functions that read tables of a CPU on purpose."""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("way", changed.WAYS)
def test_a_run_uses_the_tables_of_now(call, way):
    """Seen red with: plans that a run finds in the caches of the run before."""
    table, change = changed.WAYS[way]()
    for content in (changed.OLD, changed.NEW):
        fresh = changed._values(call, content.clone())
        for _ in range(2):
            with recorded.Run():
                found = changed._values(call, table)
            for a, b in zip(found, fresh, strict=True):
                same(a, b)
        change()


@pytest.fixture
def host_reads(monkeypatch):
    """Names of the functions of plans and graphs that read a tensor's values."""
    seen: list[str] = []

    def watch(name):
        method = getattr(torch.Tensor, name)

        def spied(self, *args, **kwargs):
            frame, names = sys._getframe(1), []
            while frame is not None and "torchweft" in frame.f_code.co_filename:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            readers = ("_tables", "_build", "_sort", "_order", "cut", "pieces", "_longest", "_cut")
            if set(names) & set(readers) and not set(names) & set(ALLOWED):
                seen.append(names[0])
            return method(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spied)

    for name in READS:
        watch(name)
    return seen


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
def test_a_run_reads_no_table(call, host_reads):
    """Seen red with: the facts of a graph, and the longest segment of a plan."""
    changed._values(call, changed.OLD.clone())
    assert host_reads or call in (changed._by_element, changed._contracted)
    host_reads.clear()
    with recorded.Run():
        changed._values(call, changed.OLD.clone())
    assert not host_reads


def _segments(x, seg):
    """Terms before the first and after the last segment belong to none."""
    rows = x[:1].repeat(changed.COUNT, 1) * torch.arange(changed.COUNT)[:, None]
    return products.indexed_mul_scale_gather(rows, rows, None, seg=seg)


def test_segments_that_leave_terms_out(host_reads):
    x = changed._rows(changed.ROWS, 3)
    for seg in (torch.tensor([2, 5, 5, 9]), torch.tensor([0, 1, 2, 12])):
        exact = changed._values(_segments, seg)
        host_reads.clear()
        with recorded.Run():
            found = changed._values(_segments, seg.clone())
        assert not host_reads
        for a, b in zip(found, exact, strict=True):
            same(a, b)
    assert len(_segments(x, seg)) == 3


def test_layers_of_a_run_share_a_graph(monkeypatch):
    """Seen red with: edges sorted by each layer, as inside torch.compile."""
    sorts = []
    sort = sorting.sorted_by_torch
    monkeypatch.setattr(sorting, "sorted_by_torch", lambda *g: sorts.append(g) or sort(*g))
    with recorded.Run():
        for _ in range(3):
            changed._values(changed._convolved, changed.NEW)
    assert len(sorts) == 2  # by src, and by dst


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("recording", [False, True])
def test_rows_of_a_constant_in_a_run(before, recording, monkeypatch, host_reads):
    """They are sorted once for all runs, unless the first is recorded: it holds nothing yet.

    Seen red with: rows sorted in each run.
    """
    sorts, sort = [], sorting.sorted_by_torch
    monkeypatch.setattr(sorting, "sorted_by_torch", lambda *g: sorts.append(g) or sort(*g))
    pair, x = torchweft.constant(torch.stack([changed.NEW, changed.OLD])), changed._rows(9, 3)
    exact = changed._convolved(x, changed.NEW.clone())
    if before:
        changed._of_pair(x, pair)
    sorts.clear()
    host_reads.clear()
    for runs in range(1, 3):
        with recorded.Run(recording) as run:
            same(changed._of_pair(x, pair), exact)
            once = not recording or before
            assert bool(run.copies) != once
        assert len(sorts) == (2 * (not before) if once else 2 * runs)


def test_nothing_of_a_run_stays():
    before = len(table_copies._copies), len(o3.graph._graphs._entries)
    table = changed.NEW.clone()
    with recorded.Run() as run:
        changed._values(changed._convolved, table)
    assert (len(table_copies._copies), len(o3.graph._graphs._entries)) == before
    assert not run.copies


def test_what_ends_with_a_run_is_told_of_its_error():
    """Else it would launch what nobody reads; seen red with: contexts that are closed."""
    told = []

    class Context:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            told.append(kind)

    def run(error):
        with recorded.Run() as made:
            made.until_end(Context())
            if error is not None:
                raise error

    run(None)
    with pytest.raises(ValueError, match="ended"):
        run(ValueError("ended"))
    assert told == [None, ValueError]


def test_a_table_written_in_a_run_is_read_again():
    table, x = changed.OLD.clone(), changed._rows(changed.ROWS, 3)
    with recorded.Run():
        before = changed._gathered(x, table)
        after = changed._gathered(x, table.copy_(changed.NEW))
    same(before, changed._gathered(x, changed.OLD.clone()))
    same(after, changed._gathered(x, changed.NEW.clone()))


def test_constants_keep_their_plan_and_the_record_keeps_it():
    table = torchweft.constant(changed.OLD)
    x = changed._rows(changed.ROWS, 3)
    plain = products.indexed_mul(x, x, index1=table, index2=table)
    with recorded.Run() as run:
        same(products.indexed_mul(x, x, index1=table, index2=table), plain)
        assert not run.copies
    products.forget()
    assert any(isinstance(value, torchweft.core.tables.Plan) for value in run.kept)


@pytest.mark.parametrize("limit", [1, 3, 50])
@pytest.mark.parametrize("keep_empty", [True, False])
def test_segments_cut_without_a_read(limit, keep_empty):
    indptr = torch.tensor([2, 2, 9, 10, 10, 31], dtype=torch.int32)
    exact = cut(indptr, limit, keep_empty)
    most = exact.num_pieces + 4
    found = cut(indptr, limit, keep_empty, most)
    assert found.num_pieces == most
    same(found.owner_indptr, exact.owner_indptr)
    same(found.owner[:-4], exact.owner)
    same(found.indptr[: exact.num_pieces + 1], exact.indptr)
    same(found.indptr.diff()[exact.num_pieces :], torch.zeros(4, dtype=torch.int32))


def test_long_segments_are_cut_in_a_run():
    """More terms than one program sums: their pieces are bounded, not counted."""
    x = torch.ones(20_000, 1, dtype=torch.float64).cumsum(0)
    index = torch.arange(20_000) // 19_000

    def summed(table):
        return products.indexed_mul_scale_gather(x, x, None, index_out=table, out_size=2)

    exact = summed(index)
    with recorded.Run():
        same(summed(index), exact)


KERNEL_CALLS = {
    "mul": ((600, 3), (600, 3)),
    "inner": ((600, 3), (600, 3)),
    "outer": ((600, 3), (600, 2)),
    "vecmat": ((600, 3), (600, 3, 2)),
}


@pytest.mark.parametrize("op", KERNEL_CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_of_plans_that_are_not_read(op, backend):
    """Rows of 300 terms are cut: the last of the pieces are empty, and in no sum.

    Sums of small integers are exact, in any order.
    """
    x, y = (changed._rows(*shape).round() for shape in KERNEL_CALLS[op])
    table = torch.arange(600) % 2
    function = getattr(products, f"indexed_{op}_scale_gather")

    def values():
        given = x.clone().requires_grad_(), y.clone().requires_grad_()
        tables = {"index1": table.flip(0), "index_out": table, "out_size": 2}
        z = function(*given, None, **tables, backend=backend)
        return [z.detach(), *torch.autograd.grad(z.square().sum(), given)]

    exact = values()
    with recorded.Run():
        found = values()
    for a, b in zip(found, exact, strict=True):
        same(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_of_graphs_that_are_not_read(backend):
    """The edges of a run have an order, whether they are sorted or not."""
    conv = o3.TensorProductConv("2x0e", "0e", "2x0e", [(0, 0, 0, "uvu", True)], backend=backend)
    x = changed._rows(changed.ROWS, 2)

    def values():
        given = [t.clone().requires_grad_() for t in (x, *changed.EDGES)]
        z = conv(*given, changed.NEW, changed.OLD.sort().values, changed.ROWS)
        return [z.detach(), *torch.autograd.grad(z.square().sum(), given)]

    exact = values()
    with recorded.Run():
        found = values()
    for a, b in zip(found, exact, strict=True):
        same(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_formed_weights(backend, monkeypatch, host_reads):
    """Weights of all edges pass the memory of a block: blocks have all rows.

    A run takes larger ones, since a replay sorts the edges of each, by src alone: they are in the
    order of dst.  Seen red with: equal blocks, rows of z counted from the first edge of the graph.
    """
    counts, blocks, sorts, sort = [], radial_linear._blocks, [], sorting.sorted_by_torch
    monkeypatch.setattr(sorting, "sorted_by_torch", lambda *g: sorts.append(g) or sort(*g))

    def counted(tables, step):
        counts.append(len(found := blocks(tables, step)))
        return found

    monkeypatch.setattr(radial_linear, "_blocks", counted)
    given = (changed._rows(changed.ROWS, 2), *changed.EDGES, changed._rows(2, 2))
    ends = {"src": changed.OLD, "dst": changed.NEW, "num_nodes": changed.ROWS}
    paths = [(0, 0, 0, "uvu", True)]
    conv = o3.TensorProductConv("2x0e", "0e", "2x0e", paths, backend=backend)

    def convolved():
        counts.clear()
        x, y, h, matrix = leaves = [t.clone().requires_grad_() for t in given]
        z = conv(x, y, **ends, radial=h, radial_weight=matrix)
        found = [z.detach(), *torch.autograd.grad(z.square().sum(), leaves)]
        (count,) = set(counts)
        return found, count

    monkeypatch.setitem(radial_linear.BLOCK_BYTES, "cpu", 32)
    host_reads.clear()
    with recorded.Run():
        found, run = convolved()
    assert not host_reads
    assert len(sorts) == 2 + run
    _, smaller = convolved()
    monkeypatch.setitem(radial_linear.BLOCK_BYTES, "cpu", 32 * radial_linear.MOST_BLOCK_TIMES)
    exact, equal = convolved()
    for a, b in zip(found, exact, strict=True):
        same(a, b)
    assert 1 < run == equal < smaller


def test_sizes_that_depend_on_values():
    with recorded.Run():
        with pytest.raises(torchweft.ShapeError, match=r"num_nodes was left out inside.*capture"):
            o3.Graph(changed.OLD, changed.NEW)
        with pytest.raises(torchweft.ShapeError, match=r"without out_size inside.*capture"):
            changed._largest(changed._rows(changed.ROWS, 3), changed.OLD)


def test_a_map_is_not_built_while_a_graph_is_recorded(monkeypatch):
    """Its numbers of rows are read by the host: the flags would be those of no launch."""
    flags = tiles.Flags(torch.device("cpu"))
    flags.written()
    flags._event = object()
    monkeypatch.setattr(tiles, "_captured", lambda tensor: True)
    with pytest.raises(torchweft.CaptureError, match=r"kernel map are built.*wait.*replace\(feats"):
        flags.read()
    flags._event = None


def test_tables_that_die_in_a_run():
    """Another table may get the identity of one; seen red with: plans found by identity alone."""
    x = changed._rows(changed.ROWS, 3)
    with recorded.Run(), Watch():
        for seed in range(40):
            index = torch.randperm(changed.ROWS, generator=torch.Generator().manual_seed(seed))
            same(products.indexed_mul(x, x, index, index), x[index] * x[index])
            del index


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls that are watched find no private copies."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
