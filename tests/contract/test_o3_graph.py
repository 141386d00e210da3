"""Graphs: what their tables say, that they are built once, that they follow their tensors; errors.

Seen red with: a cache that looks at src alone, an order that is not stable, copies that read the
rows of another copy, a graph that holds the caller's tensors.
"""

import copy
import gc
import itertools
import weakref

import pytest
import torch

from tests.cases.channelwise import GRAPHS
from tests.cases.o3_workloads import ring_graph
from tests.conftest import INTERPRETED
from torchweft.core.tables import SLICE
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.o3 import graph as graph_module
from torchweft.o3.graph import Graph, graph_of, pack, repeated, unpack

if INTERPRETED:
    pytest.skip("graphs do not depend on the backend", allow_module_level=True)

SRC, DST = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([1, 0, 1, 1, 3])


def tensors(tables):
    return pack(tables)[0]


def test_tables():
    graph = Graph(SRC, DST, 5, 3)
    tables = graph.tables
    assert (tables.num_x, tables.num_z, tables.num_edges) == (3, 5, 5)
    assert tables.z_indptr.tolist() == [0, 1, 4, 4, 5, 5]
    assert tables.z_edges.tolist() == [1, 0, 2, 3, 4]
    assert tables.x_indptr.tolist() == [0, 2, 3, 5]
    assert tables.x_edges.tolist() == [0, 4, 2, 1, 3]
    assert {t.dtype for t in tensors(tables)} == {torch.int32}
    assert (graph.src.tolist(), graph.dst.tolist()) == (SRC.tolist(), DST.tolist())
    assert repr(graph) == "Graph(5 edges, 3 to 5 rows)"


def test_sorted_edges_need_no_order():
    order = torch.argsort(DST, stable=True)
    tables = Graph(SRC[order], DST[order]).tables
    assert tables.z_edges is None
    assert tables.x_edges is not None
    assert Graph(SRC.sort().values, DST).tables.x_edges is None


def test_rows_left_out_are_counted():
    graph = Graph(SRC, DST)
    assert (graph.num_nodes, graph.num_sources, graph.num_edges) == (4, 4, 5)
    assert Graph(SRC[:0], DST[:0]).num_nodes == 0


def test_long_rows_are_cut():
    hub = GRAPHS["hub"]
    tables = Graph(*hub).tables
    for slices, indptr in (
        (tables.z_slices, tables.z_indptr),
        (tables.x_slices, tables.x_indptr),
    ):
        assert slices.indptr.diff().max() <= SLICE
        assert slices.owner_indptr[-1] == slices.num_pieces > indptr.numel() - 1
    assert Graph(SRC, DST).tables.z_slices is None


def in_runs(monkeypatch, src, dst, num_x, num_z, few=0.25):
    monkeypatch.setattr(graph_module, "MIN_RUN_EDGES", 0)
    monkeypatch.setattr(graph_module, "MAX_RUNS_PER_EDGE", few)
    return graph_module.runs_of(src.int(), dst.int(), num_x, num_z)


@pytest.mark.parametrize("sources", [300, 400])
def test_runs(monkeypatch, sources):
    """Every edge is in one; its edges share a row of x, and a tile of rows of z.

    Seen red with: an order that forgets the rows of z, runs cut where their rows do not change.
    """
    src, dst = ring_graph(300, 12)
    edges = (torch.cat([t, t[:9]]) for t in (src, dst))
    found = in_runs(monkeypatch, *edges, sources, 300, few=1)
    assert {t.dtype for t in found} == {torch.int32}
    assert len(found.owner) % graph_module.RUNS_PER_PROGRAM == 0
    count = len(found.edges)
    assert sorted(found.edges.tolist()) == list(range(len(src) + 9))
    assert found.indptr[0] == 0
    assert found.indptr[-1] == count
    edge = found.edges.long() % len(src)
    of = torch.repeat_interleave(found.indptr.diff().long())
    assert src[edge].tolist() == found.owner[of].tolist()
    assert dst[edge].tolist() == found.rows.tolist()
    place = graph_module._near(src, dst, sources, 300).argsort()[found.rows]
    for begin, end in zip(found.indptr[:-1], found.indptr[1:], strict=True):
        assert len(found.rows[begin:end].unique()) <= graph_module.RUN_TILE
        assert (place[begin:end].diff() >= 0).all()
    whole = [found.order[a:b].tolist() for a, b in itertools.pairwise(found.bounds.tolist())]
    for row, mine in enumerate(whole):
        assert all(found.owner[r] == row for r in mine)
    assert sorted(itertools.chain(*whole)) == list(range(int((found.indptr.diff() > 0).sum())))


def test_runs_of_rows_that_are_near(monkeypatch):
    """Labels are random, yet rows near each other meet: a tile of 16 of a ring has 47 sources."""
    src, dst = ring_graph(1000, 32)
    found = in_runs(monkeypatch, src, dst, 1000, 1000)
    assert len(src) > 5 * len(found.owner)
    far = torch.randint(9000, dst.shape, generator=torch.Generator().manual_seed(0))
    assert in_runs(monkeypatch, far, dst, 9000, 1000) is None
    monkeypatch.undo()
    assert graph_module.runs_of(src, dst, 1000, 1000) is None  # few edges


@pytest.mark.parametrize("reused", [False, True])
def test_runs_are_made_where_a_graph_is_reused(monkeypatch, reused):
    """On a GPU; seen red with: runs of every graph, those of a moved one forgotten."""
    monkeypatch.setattr(graph_module, "MIN_RUN_EDGES", 0)
    src, dst = ring_graph(100, 32)
    seen = []
    monkeypatch.setattr(graph_module, "_with_runs", lambda tables: seen.append(0) or tables)
    Graph(src, dst, reused=reused).to("cpu")
    graph_of(src, dst, 100, 100)
    assert len(seen) == 2 * reused
    monkeypatch.undo()
    assert Graph(src, dst, reused=True).tables.runs is None  # loops on a CPU have no use for them


def test_packing_runs(monkeypatch):
    src, dst = ring_graph(40, 8)
    tables = Graph(src, dst).tables._replace(runs=in_runs(monkeypatch, src, dst, 40, 40))
    again = unpack(*pack(tables), *tables[:3])
    assert again[9:11] == (None, None)
    for a, b in zip(tensors(again), tensors(tables), strict=True):
        assert a is b


def test_packing():
    for name in ("hub", "sorted", "unsorted", "no edges"):
        tables = Graph(*GRAPHS[name]).tables
        again = unpack(*pack(tables), *tables[:3])
        assert pack(again)[1] == pack(tables)[1]
        for a, b in zip(tensors(again), tensors(tables), strict=True):
            assert a is b


@pytest.mark.parametrize("name", ["hub", "sorted", "two sets", "no edges"])
def test_copies_side_by_side_are_the_graph_of_all(name):
    edges = GRAPHS[name]
    found = repeated(Graph(*edges).tables, 3)
    copies = torch.arange(3)[:, None]
    src = (edges.src + copies * edges.num_sources).flatten()
    dst = (edges.dst + copies * edges.num_nodes).flatten()
    exact = Graph(src, dst, 3 * edges.num_nodes, 3 * edges.num_sources).tables
    assert found[:3] == exact[:3]
    assert pack(found)[1] == pack(exact)[1]
    for a, b in zip(tensors(found), tensors(exact), strict=True):
        assert a.tolist() == b.tolist()
        assert a.dtype == b.dtype


def test_the_same_tensors_are_sorted_once():
    src, dst = SRC.clone(), DST.clone()
    graph = graph_of(src, dst, 4, 3)
    assert graph_of(src, dst, 4, 3) is graph
    assert graph_of(src, dst, 5, 3) is not graph
    dst[0] = 0
    changed = graph_of(src, dst, 4, 3)
    assert changed is not graph
    assert changed.dst.tolist() == dst.tolist()
    assert graph.dst.tolist() == DST.tolist()  # a graph holds copies


def test_a_kept_graph_goes_with_its_tensors():
    src = SRC.int()
    graph = weakref.ref(graph_of(src, DST, 4, 3))
    assert graph() is not None
    del src
    gc.collect()
    assert graph() is None


def test_tables_made_under_a_transform_outlive_it():
    kept = []

    def loss(x):
        kept.append(graph_of(SRC.clone(), DST.clone(), 4, 3))
        return x.sum()

    torch.func.grad(loss)(torch.ones(3))
    for table in tensors(kept[0].tables):
        assert table.data_ptr()


def test_a_graph_of_inference_mode_serves_training():
    """Seen red with: tables made in inference mode, which autograd cannot keep."""
    src, dst = SRC.clone(), DST.clone()
    with torch.inference_mode():
        kept = graph_of(src, dst, 4, 3)
    assert not any(t.is_inference() for t in tensors(kept.tables))
    assert graph_of(src, dst, 4, 3) is kept


def test_to():
    graph = Graph(SRC, DST, 5, 3)
    again = graph.to("cpu")
    assert (again.num_nodes, again.num_sources) == (5, 3)
    assert again.src.tolist() == SRC.tolist()


def test_a_graph_is_saved_and_loaded(tmp_path):
    """By torch.load's defaults.  Seen red with: a graph of another kind than the one saved."""
    graph = Graph(SRC, DST, 5, 3, reused=True)
    torch.save(graph, tmp_path / "graph.pt")
    for again in (torch.load(tmp_path / "graph.pt"), copy.deepcopy(graph)):
        assert repr(again) == repr(graph)
        assert again.kind is graph.kind
        assert again.reused
        for found, expected in zip(again.packed, graph.packed, strict=True):
            assert found.tolist() == expected.tolist()


class TestErrors:
    def test_tensors(self):
        with pytest.raises(DTypeError, match="src is a list: it must be"):
            Graph([0], DST)
        with pytest.raises(DTypeError, match=r"dst is torch\.float32: edges are numbers of rows"):
            Graph(SRC, DST.float())
        with pytest.raises(ShapeError, match=r"src is \(1, 5\): it must be \(E,\)"):
            Graph(SRC[None], DST)
        with pytest.raises(ShapeError, match="src has 5 edges and dst has 4"):
            Graph(SRC, DST[1:])
        with pytest.raises(DeviceError, match="src is on cpu and dst on meta"):
            Graph(SRC, DST.to("meta"))

    def test_ranges(self):
        with pytest.raises(IndexRangeError, match=r"src\[1\] is 2 but there are 2 rows of x"):
            Graph(SRC, DST, 4, 2)
        with pytest.raises(IndexRangeError, match=r"dst\[4\] is 3 but there are 3 rows to add to"):
            Graph(SRC, DST, 3)
        with pytest.raises(IndexRangeError, match=r"dst\[0\] is -1 .* must lie in 0..3"):
            Graph(SRC, torch.tensor([-1, 0, 0, 0, 0]), 4)

    @pytest.mark.parametrize("size", [6.0, -1, "6"])
    def test_numbers_of_rows(self, size):
        for name in ("num_nodes", "num_sources"):
            with pytest.raises(ShapeError, match=f"{name} is {size!r}: it must be an integer, 0"):
                Graph(SRC, DST, **{name: size})

    def test_rows_must_be_known_when_compiling(self):
        def rows(src, dst):
            return Graph(src, dst).src

        compiled = torch.compile(rows, fullgraph=True, backend="eager")
        with pytest.raises(RuntimeError, match=r"num_nodes was left out inside torch\.compile"):
            compiled(SRC, DST)


def test_a_list_as_the_number_of_nodes():
    """Seen red with: a bare TypeError of the cache, as before."""
    with pytest.raises(ShapeError, match=r"num_nodes is \[4\]: it must be an integer"):
        graph_of(SRC, DST, [4], 3)
