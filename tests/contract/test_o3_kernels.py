"""Generated kernels of channelwise products against the oracle, in the interpreter.

Seen red with: a gradient of w without its path's factor, tiles of edges without their mask, pieces
that take the row of their own number, parts of the first block of channels alone, second parts
dropped, edges taken in the order of their numbers, coefficients rounded to float32, shares of a row
that leave out its last edges, sums by halves stored one column on or over the wrong threads, sums
of edges that are not there stored, runs stored at their first edge, the edge after the next
prefetched and taken, parts lent columns of kernels that have run, of the kernel itself or twice,
own parts of two kernels in one place, loans summed after the next kernel, of cut rows, of what
channels share, without their last entries, places taken for columns.
"""

import itertools

import pytest
import torch

from tests.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from tests.cases.o3_workloads import calls, conv, elementwise, row_by_row, rows
from torchweft.core.tables import cut
from torchweft.o3 import graph as edges_graph
from torchweft.o3 import reference
from torchweft.o3.channelwise.calls import Call, Result, forward, gradient, tangent
from torchweft.o3.channelwise.gpu import kernel_spec, kernel_split, launch
from torchweft.o3.channelwise.gpu.kernel_spec import RowTiling
from torchweft.o3.channelwise.gpu.kernel_split import lend_columns
from torchweft.o3.channelwise.structure import SLOTS, Block, Path, Product, Structure
from torchweft.o3.graph import Graph, Tables
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

SRC = torch.tensor([0, 1, 1, 2, 0, 3, 3, 1])
DST = torch.tensor([1, 0, 1, 4, 4, 0, 4, 4])
UNSORTED = Graph(SRC, DST, 5, 4).tables
SORTED = Graph(SRC[DST.argsort(stable=True)], DST.sort().values, 6, 4).tables
CUT = UNSORTED._replace(z_slices=cut(UNSORTED.z_indptr, 2), x_slices=cut(UNSORTED.x_indptr, 2))
SOURCES = UNSORTED._replace(num_z=8, dst=None, z_indptr=None, z_edges=None)
TARGETS = UNSORTED._replace(num_x=8, src=None, x_indptr=None, x_edges=None)
TABLES = {
    "unsorted": UNSORTED,
    "sorted": SORTED,
    "cut": CUT,
    "sources": SOURCES,
    "targets": TARGETS,
    "rows": row_by_row(5),
}

# 3x1o with 3x0e as uvu (z0 = Σ_v x_u y_v) and uvv (z1 = Σ_u x_u y_v), mul_ir: blocks overlap
UVU = tuple(Path(0, v, 0, v, 0.7) for v in range(3))
UVV = tuple(Path(1 + u, 3, 1, 3 + u, -1.3) for u in range(3))
OVERLAPPING = Structure(
    (10, 3, 18, 18),
    (
        Product(
            3,
            (Block(1, 1, 1, 3), *(Block(1 + 3 * u, 1, 1, 0) for u in range(3))),
            (*(Block(v, 0, 1, 0) for v in range(3)), Block(0, 0, 1, 1)),
            (Block(0, 1, 1, 3), Block(9, 1, 3, 1)),
            tuple(Block(n, 0, 1, 3) for n in (0, 1, 2))
            + tuple(Block(9 + 3 * u, 0, 1, 1) for u in range(3)),
            UVU + UVV,
        ),
    ),
)
RAGGED = conv(((3, 0), (3, 1), (5, 1)), (0, 1), natural=False)
STRUCTURES = {
    "ragged": RAGGED,
    "overlapping": OVERLAPPING,
    "elementwise": elementwise(6, (0, 1)),
    "many channels": conv(((70, 1),), (1,), natural=False),
}


def unweighted(structure):
    products = tuple(
        p._replace(w=(), paths=tuple(path._replace(w=-1) for path in p.paths))
        for p in structure.products
    )
    return Structure((*structure.widths[:3], 0), products)


def oracle(structure, call, tensors, tables, shared, sign=torch.positive):
    """The derivatives of Q = ⟨z, product⟩ that a call names, in float64."""
    counts = {"x": tables.num_x, "y": tables.num_edges, "z": tables.num_z}
    counts["w"] = 1 if shared else tables.num_edges
    found = []
    for slot, terms in call.results:
        total = torch.zeros(counts[slot], structure.width(slot), dtype=torch.float64)
        for term in terms:
            others = (s for s in SLOTS if s != slot)
            at = dict(zip(others, (tensors[t].double() for t in term), strict=False))
            at[slot] = torch.zeros_like(total).requires_grad_()
            w = at.get("w")
            weight = w if w is None or not shared else w[0]
            out = reference.channelwise_reference(
                structure, at["x"], at["y"], weight, tables.src, tables.dst, tables.num_z, sign
            )
            form = (out * at["z"]).sum() + 0 * at[slot].sum()  # a gradient without paths too
            total += torch.autograd.grad(form, at[slot])[0]
        found.append(total)
    return found


def check(structure, call, tables, shared=False, dtype=torch.float32):
    tensors = rows(structure, call, tables, shared, dtype)
    results = launch.run(structure, call, tensors, tables, shared)
    exact = oracle(structure, call, tensors, tables, shared)
    sizes = oracle(structure, call, [t.abs() for t in tensors], tables, shared, torch.abs)
    for result, value, size in zip(results, exact, sizes, strict=True):
        assert result.dtype == dtype
        assert_within_bound(result, value, size, tables.num_edges)
    return results


@pytest.fixture
def fresh():
    """Nothing is remembered before or after."""

    def forget():
        kernel_split.split_call.cache_clear()
        launch._recipes.clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("order", calls())
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.singly  # seconds an item in the interpreter
def test_orders(name, tables, shared, order):
    check(STRUCTURES[name], calls()[order], TABLES[tables], shared)


@pytest.mark.parametrize("order", calls())
@pytest.mark.parametrize("tables", ["cut", "rows"])
@pytest.mark.parametrize("name", ["ragged", "overlapping"])
def test_without_weights(name, tables, order):
    check(unweighted(STRUCTURES[name]), calls(weighted=False)[order], TABLES[tables])


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)))
def test_subsets(needed):
    call = gradient(forward(weighted=True), needed, (True,))
    check(RAGGED, call, UNSORTED)
    check(RAGGED, call, row_by_row(3), shared=True)


def test_third_order():
    call = calls()["second order"]
    check(RAGGED, gradient(call, (True,) * 7, (True,) * 4), CUT)


def test_tangents():
    check(RAGGED, tangent(forward(weighted=True), (True, False, True)), UNSORTED)


@pytest.mark.parametrize("way", ["by source", "by scratch"])
@pytest.mark.parametrize("order", ["backward", "second order"])
def test_gradients_of_x(fresh, monkeypatch, way, order):
    monkeypatch.setattr(kernel_split, "_by_source", lambda *given: way == "by source")
    check(RAGGED, calls()[order], CUT)
    check(OVERLAPPING, calls()[order], SORTED, shared=True)


@pytest.mark.parametrize(
    "tiling",
    [
        RowTiling(4, stages=3),
        RowTiling(2, edges=4),
        RowTiling(8, edges=2),
        RowTiling(2, edges=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["forward", "second order"])
@pytest.mark.singly  # seconds an item in the interpreter
def test_tilings(fresh, monkeypatch, tiling, order):
    monkeypatch.setattr(kernel_split, "choose_tiling", lambda spec: tiling)
    for structure, shared in ((RAGGED, False), (OVERLAPPING, True)):
        for tables in (CUT, row_by_row(3)):
            check(structure, calls()[order], tables, shared)


WIDE = conv(((96, 0), (64, 1)), (0, 1), natural=False)


@pytest.mark.parametrize("tiling", [RowTiling(32, 2, 2), RowTiling(64, 4, 4)], ids=str)
@pytest.mark.parametrize("order", ["backward", "second order"])
def test_an_edge_a_warp(fresh, monkeypatch, tiling, order):
    """Sums over channels by halves, for each edge of a tile."""
    monkeypatch.setattr(kernel_split, "choose_tiling", lambda spec: tiling)
    for tables in (SORTED, CUT):
        check(WIDE, calls()[order], tables)


@pytest.mark.parametrize("order", calls())
def test_groups(fresh, monkeypatch, order):
    monkeypatch.setattr(kernel_spec, "MAX_TERMS", 8)
    call = calls()[order]
    facts = launch._facts(OVERLAPPING, CUT, False, torch.float32)
    assert len(kernel_split.split_call(OVERLAPPING, call, facts).kernels) > 1
    check(OVERLAPPING, call, CUT)
    check(RAGGED, call, row_by_row(5), shared=True)


@pytest.mark.parametrize("tables", ["unsorted", "sorted", "cut"])
@pytest.mark.parametrize("edges", [1, 2])
@pytest.mark.singly  # seconds an item in the interpreter
def test_shared_rows(fresh, monkeypatch, edges, tables):
    monkeypatch.setattr(launch, "EDGES_PER_WARP", edges)
    tables = TABLES[tables]._replace(num_z=2, dst=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]).int())
    order = torch.tensor([3, 1, 0, 2, 4, 7, 5, 6]).int()
    ends, cuts = torch.tensor([0, 5, 8]).int(), tables.z_slices and cut(torch.tensor([0, 5, 8]), 2)
    tables = tables._replace(z_indptr=ends, z_edges=order, z_slices=cuts)
    for name in STRUCTURES:
        check(STRUCTURES[name], calls()["backward"], tables)


TWICE = Graph(torch.cat([SRC, SRC, SRC[:3]]), torch.cat([DST, DST, DST[:3]]), 5, 4).tables
RUNS = {"unsorted": UNSORTED, "sorted": SORTED, "edges twice": TWICE}


@pytest.fixture
def in_runs(fresh, monkeypatch):
    """Tables with the runs of two rows of z, however many."""
    monkeypatch.setattr(edges_graph, "MIN_RUN_EDGES", 0)
    monkeypatch.setattr(edges_graph, "MAX_RUNS_PER_EDGE", 1)
    monkeypatch.setattr(edges_graph, "RUN_TILE", 2)
    return lambda t: t._replace(runs=edges_graph.runs_of(t.src, t.dst, t.num_x, t.num_z))


SEVERAL = conv(((64, 0), (64, 1), (32, 1)), (0, 1), natural=False)


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("tables", RUNS)
@pytest.mark.singly  # seconds an item in the interpreter
def test_runs(in_runs, tables, needed):
    given = in_runs(RUNS[tables])
    call = gradient(forward(weighted=True), needed, (True,))
    check(SEVERAL, call, given)
    facts = launch._facts(SEVERAL, given, False, torch.float32)
    kernels = kernel_split.split_call(SEVERAL, call, facts).kernels
    assert [spec.runs for spec, *_ in kernels] == [needed[0]] * len(kernels)


@pytest.mark.parametrize("order", calls())
def test_what_runs_do_not_serve_is_right_with_them(in_runs, order):
    given = in_runs(UNSORTED)
    check(RAGGED, calls()[order], given)
    check(SEVERAL, calls()[order], given, shared=True)
    check(SEVERAL, calls()[order], given, dtype=torch.float64)


def test_runs_of_16_bits_and_without_weights(in_runs):
    given = in_runs(TWICE)
    check(SEVERAL, calls()["backward"], given, dtype=torch.bfloat16)
    check(unweighted(SEVERAL), calls(weighted=False)["backward"], given)
    call, last = calls()["backward"], None
    tensors = rows(SEVERAL, call, given, False)
    for found in (launch.run(SEVERAL, call, tensors, given, False) for _ in range(2)):
        for a, b in zip(found, last or found, strict=True):
            assert_same_bits(a, b, "the same call again")
        last = found


BOTH = Graph(torch.arange(8) // 3, torch.arange(8) // 2, 5, 4).tables
HUB = SORTED._replace(z_slices=cut(SORTED.z_indptr, 2))
LENT = {
    "sorted": SORTED,
    "both sorted": BOTH,
    "a hub of targets": HUB,
    "unsorted": UNSORTED,
    "sources": SOURCES,
}
ALONE = {"a hub of sources": CUT, "targets": TARGETS}
THREE = conv(((4, 0), (4, 1), (8, 1), (3, 0), (3, 1)), (0, 1), natural=False)
SHARED = Structure(  # z_u = x y_u w_u: channels share x
    (2, 4, 8, 8),
    tuple(
        Product(
            4,
            (Block(k, 0, 1, 0),),
            (Block(0, 0, 1, 1),),
            (Block(4 * k, 0, 1, 1),),
            (Block(4 * k, 0, 1, 1),),
            (Path(0, 0, 0, 0, 0.9),),
        )
        for k in range(2)
    ),
)


@pytest.fixture
def lending(fresh, monkeypatch):
    """Parts of however few edges find room."""
    monkeypatch.setattr(launch, "LENT_BYTES", 0)


@pytest.mark.parametrize("order", ["backward", "second order"])
@pytest.mark.parametrize("tables", LENT | ALONE)
@pytest.mark.singly  # seconds an item in the interpreter
def test_parts_in_the_gradient_of_weights(lending, tables, order):
    found = (LENT | ALONE)[tables]
    call = calls()[order]
    results = check(THREE, call, found)
    (recipe,) = launch._recipes.values()
    assert _borrows(recipe) == (tables in LENT)
    again = check(THREE, call, found)
    if tables == "unsorted":  # the same launches for all
        check(THREE, call, found, dtype=torch.float64)
        check(THREE, call, found, dtype=torch.bfloat16)
    for a, b in zip(results, again, strict=True):
        assert_same_bits(a, b, "the same call again")


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)))
def test_subsets_with_parts_in_the_gradient_of_weights(lending, needed):
    check(THREE, gradient(forward(weighted=True), needed, (True,)), UNSORTED)
    recipe = next(iter(launch._recipes.values()), None)
    assert (recipe is not None and _borrows(recipe)) == (needed[0] and needed[2])


def test_what_channels_share_is_not_lent(lending):
    check(SHARED, calls()["backward"], UNSORTED)
    assert not any(map(_borrows, launch._recipes.values()))


def _borrows(recipe):
    """Whether kernels add up what lies in columns of a result."""
    kernels = {step.kernel._kernel.__name__ for step in recipe.launches.steps}
    return "fold_lent_kernel" in kernels


def test_loans_by_hand():
    wanted, given = [[3], [2, 2], [4, 4]], [range(2), range(2, 6), [6, 7, 8, 9, 12, 13]]
    assert lend_columns(wanted, given) == [(1, (0, 6), True), (0, (6,), True), (2, (0, 4), False)]
    assert lend_columns([[2], [2]], [[0], [1]]) == [(0, (0,), False), (1, (2,), False)]


@pytest.mark.parametrize("seed", range(20))
def test_loans_are_columns_of_later_kernels(seed):
    random = torch.Generator().manual_seed(seed)
    kernels = torch.randint(0, 4, (60,), generator=random)
    given = [(kernels == n).nonzero().flatten().tolist() for n in range(4)]
    wanted = [torch.randint(1, 5, (n + 1,), generator=random).tolist() for n in range(4)]
    rooms = lend_columns(wanted, given)
    assert sorted(room.kernel for room in rooms) == [0, 1, 2, 3]
    assert [room.lent for room in rooms] == sorted((room.lent for room in rooms), reverse=True)
    own = []
    for at, room in enumerate(rooms):
        spans = zip(room.begins, wanted[room.kernel], strict=True)
        taken = [c for begin, size in spans for c in range(begin, begin + size)]
        later = {c for other in rooms[at + 1 :] for c in given[other.kernel]}
        assert len(set(taken)) == len(taken)
        assert set(taken) <= later if room.lent else not set(taken) & set(own)
        own += [] if room.lent else taken
    assert sorted(own) == list(range(len(own)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", calls())
def test_dtypes(dtype, order):
    degrees = conv(((3, 1), (3, 2)), (2,), natural=False)
    check(degrees, calls()[order], UNSORTED, dtype=dtype)
    check(degrees, calls()[order], row_by_row(3), shared=True, dtype=dtype)


def test_bits_repeat():
    call = calls()["second order"]
    tensors = rows(RAGGED, call, CUT, False)
    first, second = (launch.run(RAGGED, call, tensors, CUT, False) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b, "the same call again")


def test_nothing():
    none = torch.zeros(0, dtype=torch.int64)
    for tables in (Graph(none, none, 3, 2).tables, Graph(none, none, 0, 0).tables, row_by_row(0)):
        for shared in (False, True):
            check(RAGGED, calls()["backward"], tables, shared)
    empty = Structure((0, 3, 5, 2), (Product(0, (), (Block(0, 1, 1, 0),), (), (), ()),))
    check(empty, calls()["backward"], UNSORTED)
    zero = Call("xyw", (Result("z", ()), Result("x", ())))
    check(RAGGED, zero, UNSORTED)


def test_what_is_served():
    call = calls()["second order"]
    assert launch.serves(RAGGED, call, torch.bfloat16)
    assert not launch.serves(RAGGED, call, torch.complex64)
    assert not launch.serves(
        conv(tuple((1, a) for a in range(8)), tuple(range(8))), call, torch.float32
    )


@pytest.mark.parametrize("order", calls())
def test_long_tables(order):
    """Of int64, as where a number of edges or rows passes 2³¹."""
    wide = [t.long() if isinstance(t, torch.Tensor) else t for t in UNSORTED[:9]]
    check(RAGGED, calls()[order], Tables(*wide))
