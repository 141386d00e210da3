"""A graph over ranks: its edges once, even parts, and operations with the gradients of one process.

Seen red with: edges kept by their source, rows of others numbered by their ids, needed rows of one
owner out of order, weights of rows left out of the cut.
"""

import functools
import importlib.util

import pytest
import torch

from tests.nearness import beside, check_named, model_beside
from tests.ranks import in_one_thread, run
from torchweft import clifford, o3, products
from torchweft.clifford.layers.cegnn import EGCL, message_plan
from torchweft.core.default_dtype import default_dtype
from torchweft.distributed import Halo, by_metis, round_robin, shard, total
from torchweft.errors import DTypeError, IndexRangeError, ShapeError

GRAPHS = ("crystal", "chain", "random", "hub", "few")
PARTS = range(1, 8)
SIZES = [2, 3, 4]
CONTRACTED = "2x0e+2x1o"
TERMS = "2x0e+1x1o", "1x0e+1x1o", CONTRACTED
MODES = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (0, 0, 0, "uvu", True)]


@functools.cache
def graph(name):
    """(src, dst, number of rows, positions)."""
    generator = torch.Generator().manual_seed(3)
    if name == "crystal":  # periodic, with every neighbour along an axis; 2 layers meet twice
        shape = torch.tensor([6, 5, 2])
        cells = torch.cartesian_prod(*map(torch.arange, shape.tolist()))
        steps = torch.cat([torch.eye(3), -torch.eye(3)]).long()
        ends = (cells[:, None] + steps) % shape
        numbers = (ends * torch.tensor([10, 2, 1])).sum(-1)
        dst = torch.arange(60)[:, None].expand_as(numbers)
        return numbers.flatten(), dst.flatten(), 60, cells.double()
    if name == "chain":
        left = torch.arange(39)
        positions = torch.randn(40, 3, generator=generator).double().cumsum(0)
        return torch.cat([left, left + 1]), torch.cat([left + 1, left]), 40, positions
    if name == "few":
        return torch.tensor([1, 0, 0]), torch.tensor([0, 1, 0]), 2, torch.zeros(2, 3).double()
    positions = torch.rand(50, 3, generator=generator).double()
    src, dst = torch.randint(0, 50, (2, 400), generator=generator)
    if name == "hub":  # an eighth of the edges end at row 7, another begins there
        dst[:50], src[50:100] = 7, 7
    return src, dst, 50, positions


def cuts(name, parts):
    """Owners of a graph, by each cut."""
    _, _, rows, positions = graph(name)
    return {
        "numbers": {},
        "positions": {"positions": positions},
        "round robin": {"owner": round_robin(rows, parts)},
        "one has all": {"owner": torch.full((rows,), parts - 1)},
    }


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_parts_have_each_edge_once(name, parts):
    src, dst, rows, _ = graph(name)
    for cut in cuts(name, parts).values():
        shards = [shard(src, dst, rows, rank, parts, **cut) for rank in range(parts)]
        assert torch.cat([s.edges for s in shards]).sort().values.equal(torch.arange(len(src)))
        assert torch.cat([s.global_ids for s in shards]).sort().values.equal(torch.arange(rows))
        for part in shards:
            numbers = torch.cat([part.global_ids, part.needed])
            assert numbers[part.src].equal(src[part.edges])
            assert numbers[part.dst].equal(dst[part.edges])
            assert (part.dst < len(part.global_ids)).all()
            sizes = len(part.global_ids), len(part.needed), len(part.edges)
            assert part.src.unique().numel() >= sizes[1]  # no row is needed for nothing
            assert numbers.unique().numel() == sizes[0] + sizes[1]
            assert part.size(3, torch.float64) == (*sizes, 24 * sizes[1])


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ["crystal", "chain", "random", "hub"])
def test_parts_are_even_in_rows_and_edges(name, parts):
    src, dst, rows, positions = graph(name)
    given = [{}, {"positions": positions}]
    if importlib.util.find_spec("pymetis") is not None:
        given.append({"owner": by_metis(src, dst, rows, parts)})
    hub = torch.bincount(dst).max() * parts > 1.2 * len(dst)  # more than a part's edges in a row
    for cut in given:
        shards = [shard(src, dst, rows, rank, parts, **cut) for rank in range(parts)]
        for counts in ([len(s.global_ids) for s in shards], [len(s.edges) for s in shards]):
            assert max(counts) <= 1.6 * sum(counts) / parts or hub, (cut.keys(), counts)


def test_a_crystal_in_space_needs_its_surface_alone():
    """The faces of blocks, not rows at the ends of their numbers."""
    src, dst, rows, positions = graph("crystal")
    near, far = (
        max(len(shard(src, dst, rows, rank, 6, **cut).needed) for rank in range(6))
        for cut in ({"positions": positions}, {"owner": round_robin(rows, 6)})
    )
    assert near < far


def test_sizes_are_printed():
    part = shard(torch.tensor([0, 1]), torch.tensor([1, 0]), 2, 0, 2)
    assert str(part.size(64)).startswith("1 own rows, 1 of other ranks, 1 edges; 256 bytes")


edges = torch.arange(3)
FAULTS = {
    "rank is 2 and world_size is 2": (IndexRangeError, {"rank": 2}),
    "rank is -1 and": (IndexRangeError, {"rank": -1}),
    "dst holds 3 and num_nodes is 3": (IndexRangeError, {"dst": edges + 1}),
    "src holds -1: numbers of rows": (IndexRangeError, {"src": edges - 1}),
    "src has 2 edges and dst has 3": (ShapeError, {"src": edges[:2]}),
    "dst holds torch.float32 values": (DTypeError, {"dst": edges.float()}),
    "positions has 2 rows and num_nodes is 3": (ShapeError, {"positions": torch.zeros(2, 3)}),
    "owner has 4 rows": (ShapeError, {"owner": torch.zeros(4)}),
    "owner holds 0 to 2 for 2 ranks": (IndexRangeError, {"owner": edges}),
    "positions and owner were given": (
        ShapeError,
        {"positions": torch.zeros(3, 3), "owner": torch.zeros(3)},
    ),
}


@pytest.mark.parametrize("text", FAULTS)
def test_faults_are_told(text):
    error, changes = FAULTS[text]
    given = {"src": edges, "dst": edges, "num_nodes": 3, "rank": 0, "world_size": 2}
    with pytest.raises(error, match=text):
        shard(**given | changes)


class Layers(torch.nn.Module):
    """What sums over the edges of a part: a convolution, a product, messages of multivectors.

    Called with x of all rows that edges read, and y of the edges.
    """

    def __init__(self):
        super().__init__()
        self.conv = o3.TensorProductConv(*TERMS, MODES, shared_weights=False)
        self.contraction = o3.SymmetricContraction(CONTRACTED, CONTRACTED, 2, 2)
        self.messages = EGCL(1, clifford.Algebra([1.0, 1.0]), 1)
        self.weight = torch.nn.Parameter(torch.randn(self.conv.weight_numel))

    def forward(self, x, y, part):
        own = len(part.global_ids)
        z = self.conv(x, y, y[:, :1] * self.weight, o3.Graph(part.src, part.dst, own, len(x)))
        z = self.contraction(z, part.global_ids % 2)
        numbers = torch.arange(len(part.src))
        info, *_ = products.sparse_product_infos(part.src, numbers, part.dst, None, own)
        sums = products.sparse_mul(x[:, :4], y * self.weight[:1], info)
        plan = message_plan(part.src, part.dst, len(x))
        h = self.messages(x[:, :4].T[..., None], plan, y.T[..., None])
        return torch.cat([z, sums, h[:, :own, 0].T], 1)


def given(name, seed):
    """The layers, x of all rows and y of all edges; with a seed in float32, all numbers beside."""
    src, _, rows, _ = graph(name)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(len(src), 4, generator=generator, dtype=torch.float64)
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = Layers()
    return (model, x, y) if seed is None else (model_beside(model, seed), *beside([x, y], seed))


@in_one_thread
def gradients(name, part, read, add, seed=None):
    """A rank's rows, gradients of two orders by x and y, and its part of those of the weights."""
    model, x, y = given(name, seed)
    x = x[part.global_ids].requires_grad_()
    y = y[part.edges].requires_grad_()
    out = model(read(x), y, part)
    weights = dict(model.named_parameters())
    first = torch.autograd.grad(add(out.sin().sum()), (x, y), create_graph=True)
    loss = add(first[0].square().sum() + first[1].pow(3).sum())
    second = torch.autograd.grad(loss, [x, y, *weights.values()])
    by_rows = {"out": out, "x": first[0], "xx": second[0]}
    by_edges = {"y": first[1], "yy": second[1]}
    by_weights = dict(zip(weights, second[2:], strict=True))
    return [{k: t.detach() for k, t in d.items()} for d in (by_rows, by_edges, by_weights)]


def own_part(name, rank, size):
    """By positions, but the last rank of the random graph has nothing."""
    src, dst, rows, positions = graph(name)
    if name != "random":
        return shard(src, dst, rows, rank, size, positions)
    return shard(src, dst, rows, rank, size, owner=round_robin(rows, size - 1))


def over_ranks(rank, size, group):
    found = {}
    for name in GRAPHS:
        part = own_part(name, rank, size)
        halo = part.halo(group)
        assert isinstance(halo, Halo)
        assert (halo.num_rows, halo.num_halo) == (len(part.global_ids), len(part.needed))
        results = gradients(name, part, halo, lambda loss: total(loss, group))
        results[2] = {key: total(grad, group) for key, grad in results[2].items()}
        found[name] = part.global_ids, part.edges, results
    return found


@functools.cache
def one_process(name, seed=None):
    src, dst, rows, _ = graph(name)
    part = shard(src, dst, rows, 0, 1)
    by_rows, by_edges, by_weights = gradients(name, part, lambda x: x, lambda loss: loss, seed)
    return by_rows | by_edges | by_weights


@pytest.mark.parametrize("size", SIZES)
def test_operations_and_two_orders_are_those_of_one_process(size):
    found = run(over_ranks, size)
    for name in GRAPHS:
        ids, numbers, results = zip(*(ranks[name] for ranks in found), strict=True)
        by_rows, by_edges, by_weights = zip(*results, strict=True)
        whole = dict(by_weights[0])
        for places, parts in ((ids, by_rows), (numbers, by_edges)):
            order = torch.cat(places).argsort()
            whole |= {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}
        check_named(whole, one_process(name), functools.partial(one_process, name))
