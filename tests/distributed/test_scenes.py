"""A scene of voxels over ranks: every layer and a network are those of one process.

Seen red with: voxels beside a box sent on one side alone, floors whose owner does not see their
children, outputs that two ranks keep, a maximum of equals of the lowest rank, means of samples of
one rank, an inverse layer that reads as the layer itself does, a scene that keeps a message to
other ranks, which cannot be copied (tests/mutants).
"""

import copy
import functools
from unittest import mock

import pytest
import torch
from torch import nn

from tests.ranks import SIZE as EVERYONE
from tests.ranks import in_one_thread, run
from torchweft import voxels
from torchweft.core.collectives import total, world
from torchweft.distributed import shard_voxels
from torchweft.distributed.scenes.boxes import END, Box, bisected
from torchweft.errors import ShapeError, WeftError
from torchweft.voxels import (
    SparseBatchNorm,
    SparseConv3d,
    SparseInverseConv3d,
    SparseModule,
    SparseSequential,
    SparseTensor,
    SubMConv3d,
)

SIZES = [2, 3, 4]


@functools.cache
def scene(name):
    """A batch of two scenes of other sizes; one that is in a single block; nothing."""
    generator = torch.Generator().manual_seed(3)
    extents = {"two": [(14, 9, 6), (5, 5, 9)], "small": [(6, 7, 5)], "none": [(4, 4, 4)]}[name]
    rows = []
    for sample, extent in enumerate(extents):
        there = torch.rand(extent, generator=generator) < (0 if name == "none" else 0.35)
        found = there.nonzero()
        rows.append(torch.cat([torch.full_like(found[:, :1], sample), found], 1))
    coords = torch.cat(rows)
    coords = coords[torch.randperm(len(coords), generator=generator)]
    feats = torch.randn(len(coords), 3, generator=generator, dtype=torch.float64)
    return feats, coords, (14, 9, 9), len(extents)


def whole_scene(name):
    feats, *rest = scene(name)
    return SparseTensor(feats.clone().requires_grad_(), *rest)


def weights(tensor, channels):
    """A weight for each voxel and channel, which every process knows."""
    columns = torch.arange(1, tensor.C.shape[1] + 1, dtype=torch.float64)
    return (tensor.C.double() @ columns)[:, None].add(torch.arange(channels)).sin()


def score(found):
    if isinstance(found, SparseTensor):
        return (found.F.sin() * weights(found, found.F.shape[1])).sum()
    return (found.sin() * torch.arange(1, found.numel() + 1).view(found.shape)).sum()


def told(found):
    """(voxels or None, features) to send to the test."""
    if isinstance(found, SparseTensor):
        return found.C, found.F.detach()
    return None, found.detach()


def joined(parts):
    """{voxel: features} of tuples (voxels, features) of all ranks, each voxel on one."""
    coords, feats = (torch.cat(t) for t in zip(*parts, strict=True))
    order = torch.unique(coords, dim=0, return_inverse=True)[1]
    assert len(order.unique()) == len(coords)
    return coords[order.argsort()], feats[order.argsort()]


def assert_same(parts, exact):
    """The parts of all ranks against one process."""
    if exact[0] is None:
        for _, copy in parts:
            torch.testing.assert_close(copy, exact[1])
        return
    found, expected = joined(parts), joined([exact])
    assert found[0].equal(expected[0])
    torch.testing.assert_close(found[1], expected[1])


def conv(out, *geometry, cls=SparseConv3d, channels=3, **options):
    torch.manual_seed(0)
    return cls(channels, out, *geometry, **options).double()


def and_back(tensor, *geometry, **options):
    down = conv(4, *geometry, indice_key="down", **options)
    up = conv(2, geometry[0], cls=SparseInverseConv3d, channels=4, indice_key="down")
    return up(down(tensor))


def up_to_skip(tensor):
    skip = conv(4, 3, cls=SubMConv3d)(tensor)
    low = conv(5, 3, 2, outputs="floor", channels=4)(skip)
    up = conv(2, 3, 2, outputs="floor", cls=voxels.SparseConvTranspose3d, channels=5)
    return voxels.cat([skip, up(low, coordinates=skip.coordinates)])


def pruned(tensor):
    x = tensor.prune(weights(tensor, 1)[:, 0] > 0)
    return conv(4, 3, cls=SubMConv3d)(x)


def unions(tensor):
    first, second = (tensor.prune(weights(tensor, 2)[:, i] > 0) for i in range(2))
    return conv(4, 3, 2)(voxels.union([first, second]))


def normed(tensor):
    torch.manual_seed(0)
    x = voxels.SparseInstanceNorm(3).double()(tensor)
    return voxels.SparseGroupNorm(1, 3).double()(x.replace(x.F.exp()))


def equals(tensor):
    """1 or 0, with a gradient; of some channels the first 1 is not on the lowest rank with one."""
    ones = (weights(tensor, 3) > 0.7) & (tensor.C[:, 1:2] >= 6)
    return tensor.replace(tensor.F - tensor.F.detach() + ones)


def statistics_of(tensor):
    return SparseBatchNorm(tensor.F.shape[1], track_running_stats=False).double()


STEPS = {
    "submanifold": lambda x: conv(4, 3, cls=SubMConv3d)(x),
    "dilated, even": lambda x: conv(4, (2, 3, 5), cls=SubMConv3d, dilation=(3, 2, 1))(x),
    "children": lambda x: conv(4, 2, 2)(x),
    "overlapping": lambda x: conv(4, 3, 2, 1)(x),
    "gaps": lambda x: conv(4, 2, 3, 2, 2)(x),
    "floor": lambda x: conv(4, 3, 2, outputs="floor")(x),
    "floor with gaps": lambda x: conv(4, 1, (3, 2, 1), outputs="floor")(x),
    "transposed": lambda x: conv(4, 3, 2, 1, cls=voxels.SparseConvTranspose3d)(x),
    "children and back": lambda x: and_back(x, 2, 2),
    "overlapping and back": lambda x: and_back(x, 3, 2, 1),
    "floor and back": lambda x: and_back(x, 3, (2, 4, 1), outputs="floor"),
    "gaps and back": lambda x: and_back(x, 1, (3, 2, 1), outputs="floor"),
    "submanifold and back": lambda x: and_back(x, 3, cls=SubMConv3d),
    "up to a skip": up_to_skip,
    "pruned": pruned,
    "union": unions,
    "union of one": lambda x: voxels.union([x]),
    "norms of samples": normed,
    "norm without running statistics": lambda x: statistics_of(x).eval()(x),
    "max pool": lambda x: voxels.sparse_max_pool(x, 3, 2, 1),
    "mean pool": lambda x: voxels.sparse_avg_pool(x, 2, outputs="floor"),
    "upsampled": lambda x: voxels.sparse_upsample(conv(4, 2, 2)(x), 2),
    "global max": lambda x: voxels.global_pool(x, "max"),
    "global max of equals": lambda x: voxels.global_pool(equals(x), "max"),
    "global mean": lambda x: voxels.global_pool(x, "mean"),
    "global sum": lambda x: voxels.global_pool(x, "sum"),
}


@in_one_thread
def take(step, tensor, feats):
    """(result, gradient, gradient of a function of the gradient) with respect to features."""
    found = step(tensor)
    (first,) = torch.autograd.grad(score(found), feats, create_graph=True)
    (second,) = torch.autograd.grad((first.sin() * feats.cos()).sum(), feats)
    return told(found), first.detach(), second


def steps_of_rank(rank, size, group, name, block):
    tensor = whole_scene(name)
    found = []
    for step in STEPS.values():
        shard = shard_voxels(tensor, rank, size, block=block, group=group)
        own = shard.replace(shard.F.detach().requires_grad_())
        found.append((own.C, *take(step, own, own.F)))
    return found


@functools.cache
def refer(name):
    found = []
    for step in STEPS.values():
        tensor = whole_scene(name)
        found.append((tensor.C, *take(step, tensor, tensor.F)))
    return found


@pytest.mark.parametrize(
    ("size", "name", "block"), [(2, "two", 4), (3, "two", 2), (4, "two", 3), (3, "small", 16)]
)
def test_layers_and_their_gradients(size, name, block):
    ranks = run(steps_of_rank, size, name, block)
    for step, expected, *found in zip(STEPS, refer(name), *ranks, strict=True):
        coords, exact, *gradients = expected
        try:
            assert_same([part[1] for part in found], exact)
            for order, gradient in enumerate(gradients):
                parts = [(part[0], part[2 + order]) for part in found]
                assert_same(parts, (coords, gradient))
        except AssertionError as error:
            raise AssertionError(f"{step}: {error}") from error


def pooled_gradients(tensor, group=None):
    """Of voxels, of a gate of pooled features, and of a head behind a pool."""
    gate, head = (torch.arange(3.0, dtype=torch.float64).requires_grad_() for _ in range(2))
    pooled = voxels.global_pool(tensor, "mean")
    pooled.register_hook(lambda grad: total(grad, group))
    gates = (pooled * gate).sigmoid()[tensor.C[:, 0].long()]
    of_voxels = score(tensor.replace(tensor.F * gates))
    of_all = score(voxels.global_pool(tensor, "sum") * head)
    first = torch.autograd.grad(of_voxels, [tensor.F, gate])
    return *first, *torch.autograd.grad(of_all, [tensor.F, head])


def pooled_of_rank(rank, size, group):
    tensor = shard_voxels(whole_scene("two"), rank, size, block=4, group=group)
    own = tensor.replace(tensor.F.detach().requires_grad_())
    return own.C, *pooled_gradients(own, group)


def test_gradients_of_pools_are_parts_or_copies():
    coords, *found = zip(*run(pooled_of_rank, 3), strict=True)
    tensor = whole_scene("two")
    voxels_gated, gate, voxels_pooled, head = pooled_gradients(tensor)
    assert_same(list(zip(coords, found[0], strict=True)), (tensor.C, voxels_gated))
    assert_same(list(zip(coords, found[2], strict=True)), (tensor.C, voxels_pooled))
    torch.testing.assert_close(sum(found[1]), gate)
    torch.testing.assert_close(list(found[3]), [head] * 3)


class Network(SparseModule):
    """As a small MinkUNet: down twice, back up by inverse layers, skips and residuals."""

    def __init__(self, outputs):
        super().__init__()
        padding = 1 if outputs == "torch" else 0
        options = {"bias": False, "outputs": outputs}
        self.stem = SparseSequential(SubMConv3d(3, 4, 3), SparseBatchNorm(4), nn.ReLU())
        self.down = SparseConv3d(4, 6, 2, 2, indice_key="down", **options)
        self.deep = SparseConv3d(6, 8, 3, 2, padding, indice_key="deep", **options)
        self.inner = SparseSequential(SubMConv3d(8, 8, 3), SparseBatchNorm(8))
        self.undeep = SparseInverseConv3d(8, 6, 3, indice_key="deep")
        self.mixed = SparseSequential(SubMConv3d(12, 6, 3), SparseBatchNorm(6), nn.SiLU())
        self.undown = SparseInverseConv3d(6, 4, 2, indice_key="down")
        self.head = SparseSequential(SubMConv3d(8, 4, 3), SparseBatchNorm(4), nn.Linear(4, 2))

    def forward(self, tensor):
        """The features of each voxel."""
        first = self.stem(tensor)
        second = self.down(first)
        third = self.deep(second)
        third = self.inner(third) + third
        mixed = self.mixed(voxels.cat([second, self.undeep(third)]))
        return self.head(voxels.cat([first, self.undown(mixed)]))


def network_of(outputs):
    torch.manual_seed(1)
    return Network(outputs).double()


def trained(network, tensor):
    """(voxels, result, gradient), gradients of the weights, and the state after two batches."""
    network(tensor)
    found = network(tensor)
    parameters = dict(network.named_parameters())
    grads = torch.autograd.grad(score(found), [tensor.F, *parameters.values()])
    weights = dict(zip(parameters, grads[1:], strict=True))
    network.eval()
    with torch.no_grad():
        inference = network(tensor).F
    return (found.C, found.F.detach(), inference, grads[0]), weights, network.state_dict()


def network_of_rank(rank, size, group, outputs, name, block, whole):
    tensor = whole_scene(name)
    if not whole:  # ranks have some of the voxels each, none of which it keeps for sure
        part = torch.arange(rank, len(tensor), size)
        tensor = SparseTensor(tensor.F[part].detach(), tensor.C[part], *scene(name)[2:])
    shard = shard_voxels(tensor, rank, size, whole=whole, block=block, group=group)
    own = shard.replace(shard.F.detach().requires_grad_())
    network = network_of(outputs)
    assert voxels.prepare(network, own) is own
    found = trained(network, own)
    again = shard_voxels(tensor, rank, size, whole=whole, block=block, group=group)
    again = again.replace(again.F.detach().requires_grad_())
    for ours, other in zip(found[0], trained(network_of(outputs), again)[0], strict=True):
        assert ours.equal(other)
    return found


CASES = [
    (2, "torch", "two", 4, True),
    (3, "floor", "two", 3, False),
    (4, "torch", "two", 2, False),
    (2, "floor", "small", 16, True),
]


@pytest.mark.parametrize(("size", "outputs", "name", "block", "whole"), CASES)
def test_a_network_in_training_and_inference(size, outputs, name, block, whole):
    ranks = run(network_of_rank, size, outputs, name, block, whole)
    exact, weights, state = trained(network_of(outputs), whole_scene(name))
    for column in range(1, 4):
        parts = [(rows[0], rows[column]) for rows, *_ in ranks]
        assert_same(parts, (exact[0], exact[column]))
    for key, gradient in weights.items():
        torch.testing.assert_close(sum(found[key] for _, found, _ in ranks), gradient)
    for key, value in state.items():
        for *_, found in ranks:
            torch.testing.assert_close(found[key], value)
    if name == "small":
        assert min(len(rows[0]) for rows, *_ in ranks) == 0


def clouds_of_rank(rank, size, group):
    """A network in data-parallel training; the last rank has no cloud."""
    network = nn.parallel.DistributedDataParallel(network_of("torch"), process_group=group)
    feats, coords, shape, samples = scene("two")
    mine = (coords[:, 0] == rank) & (rank < samples)
    found = network(SparseTensor(feats[mine], coords[mine], shape, samples))
    (score(found) * size).backward()  # DDP takes the mean over the ranks
    grads = {name: p.grad for name, p in network.module.named_parameters()}
    return (found.C, found.F.detach()), grads, network.module.state_dict()


def test_clouds_over_ranks():
    ranks, network = run(clouds_of_rank, 4), network_of("torch")
    found = network(whole_scene("two"))
    score(found).backward()
    assert_same([part for part, *_ in ranks], told(found))
    for _, grads, state in ranks:
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)
        for name, value in network.state_dict().items():
            torch.testing.assert_close(state[name], value)


def of_ranks(rank, size, group):
    """Where the gradient of the whole scene arrives, moved voxels, and what needs one process."""
    tensor = whole_scene("two")
    found = shard_voxels(tensor, rank, size, block=4, group=group)
    (grad,) = torch.autograd.grad(score(conv(4, 3, cls=SubMConv3d)(found)), tensor.F)
    assert found.spatial_shape == tensor.spatial_shape
    assert found.batch_size == tensor.batch_size
    assert found.F.equal(tensor.F[tensor.find(found.C).long()])
    twice = voxels.kernel_map(found, 3).transpose().transpose()
    once = voxels.kernel_map(found, 3)
    assert twice.sources.equal(once.sources)
    away = (tensor.C[:, None] - found.C).abs()
    beside = ((away[..., 0] == 0) & (away.amax(2) == 1)).any(1) & (found.find(tensor.C) < 0)
    assert (once.read.find(tensor.C[beside]) >= 0).all()
    low, end = found.coordinates.shards.boxes[rank]
    slab = Box((low[0], *[n - 1 for n in low[1:]]), (end[0], *[n + 1 for n in end[1:]]))
    assert len(once.read) == slab.holds(tensor.C).sum()  # no other row is sent
    part = torch.arange(rank, len(tensor), size)
    feats = tensor.F[part].detach().requires_grad_()
    given = SparseTensor(feats, tensor.C[part], *scene("two")[2:])
    moved = shard_voxels(given, rank, size, whole=False, block=4, group=group)
    assert moved.C.equal(found.C)
    assert moved.F.equal(found.F)
    (back,) = torch.autograd.grad(score(moved), feats)
    return grad, (part, back), len(found), [needs_one_process(found, *c) for c in ONE_PROCESS]


def group_of(tensor):
    return tensor.coordinates.shards.group


def needs_one_process(tensor, call, kind):
    with pytest.raises(kind) as raised:
        call(tensor)
    return str(raised.value)


ONE_PROCESS = [
    (lambda x: x.dense(), ShapeError),
    (lambda x: voxels.sparse_collate([x, x]), ShapeError),
    (lambda x: voxels.devoxelize(x, torch.zeros(1, 3), 1.0), ShapeError),
    (lambda x: torch.utils._pytree.tree_flatten(x), ShapeError),
    (lambda x: shard_voxels(x, *world(group_of(x)), group=group_of(x)), ShapeError),
    (lambda x: SparseSequential(nn.BatchNorm1d(3))(x), ShapeError),
    (lambda x: conv(3, 3, cls=SubMConv3d)(x, norm=nn.BatchNorm1d(3).double()), ShapeError),
    (lambda x: x + whole_scene("two"), ShapeError),
    (lambda x: voxels.union([x, whole_scene("two")]), ShapeError),
    (lambda x: conv(3, 1)(x, coordinates=x.C), ShapeError),
]
TEXTS = [
    "dense() was given voxels that shard_voxels spread",
    "sparse_collate was given voxels that shard_voxels spread",
    "devoxelize was given voxels that shard_voxels spread",
    "torch.export or capture was given voxels that shard_voxels spread",
    "shard_voxels was given voxels that shard_voxels spread",
    "torch.nn.BatchNorm1d was given voxels that are spread",
    "torch.nn.BatchNorm1d was given voxels that are spread",
    "+ was given tensors that are not spread over ranks alike",
    "union was given tensors that are not spread over ranks alike",
    "coordinates and the tensor are not spread over ranks alike",
]


def test_parts_of_a_scene():
    ranks = run(of_ranks, 3)
    tensor = whole_scene("two")
    (exact,) = torch.autograd.grad(score(conv(4, 3, cls=SubMConv3d)(tensor)), tensor.F)
    torch.testing.assert_close(sum(grad for grad, *_ in ranks), exact)
    (exact,) = torch.autograd.grad(score(tensor), tensor.F)
    for _, (part, back), _, texts in ranks:
        torch.testing.assert_close(back, exact[part])
        for text, expected in zip(texts, TEXTS, strict=True):
            assert expected in text
    rows = [count for _, _, count, _ in ranks]
    assert sum(rows) == len(tensor)
    assert max(rows) <= 2 * len(tensor) / 3


def faults(rank, size, group):
    """The errors of calls in which ranks differ; the group stays usable after each."""
    feats, coords, shape, samples = scene("two")
    x = SparseTensor(feats, coords, shape, samples)
    shard = functools.partial(shard_voxels, rank=rank, world_size=size, group=group)
    twice = SparseTensor(feats[:2], coords[:1].repeat(2, 1), shape, samples)
    once = SparseTensor(feats[:1], coords[:1], shape, samples)
    own = shard(x)
    calls = [
        lambda: shard(x.prune(feats[:, 0] > 0) if rank else x),
        lambda: shard(SparseTensor(feats, coords, shape, samples, stride=1 + rank)),
        lambda: shard(SparseTensor(feats, coords, (14, 9, 9 + rank), samples)),
        lambda: shard(x, block=8 + rank),
        lambda: shard(x, block=rank),
        lambda: shard_voxels(x, 0, size, group=group),
        lambda: shard(feats if rank else x),
        lambda: shard(twice),
        lambda: shard(once, whole=False),
        lambda: conv(4, 3 + 2 * rank, cls=SubMConv3d)(own),
        lambda: conv(4, 2, 2, outputs="floor", cls=voxels.SparseConvTranspose3d)(own),
    ]
    texts = []
    for call in calls:
        with pytest.raises(WeftError) as raised:
            call()
        texts.append(str(raised.value))
    assert len(conv(4, 3, cls=SubMConv3d)(own)) == len(own)
    return texts


FAULTS = [
    "the ranks differ in scene",
    "the ranks differ in stride, rank 0 has (1, 1, 1) and rank 1 has (2, 2, 2)",
    "the ranks differ in spatial_shape, rank 0 has (14, 9, 9) and rank 1 has (14, 9, 10)",
    "the ranks differ in block, rank 0 has 8 and rank 1 has 9",
    "rank 0: block is 0: it must be at least 1",
    "rank 1: rank is 0 and world_size 2 but this process is rank 1 of 2",
    "rank 1: tensor is a Tensor",
    "rows repeat another",
    "rows repeat another",
    "the ranks differ in layer",
    "was given no coordinates",
]


def test_errors_are_told_on_all_ranks():
    first, second = run(faults, 2)
    assert first == second
    for text, expected in zip(first, FAULTS, strict=True):
        assert expected in text


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_boxes_divide_space_at_every_stride(parts):
    rows = scene("two")[1].long()
    boxes = bisected(rows, parts, (0, 1, 1, 1), (1, 2, 2, 2), None, False)
    anywhere = torch.cat([rows, -3 * rows, rows * 2**20])
    for stride in [(1, 1, 1), (2, 4, 3)]:
        assert sum(box.at(stride).holds(anywhere).long() for box in boxes).eq(1).all()
    assert len(boxes) == parts
    assert min(int(box.holds(rows).sum()) for box in boxes) > 0


@pytest.mark.parametrize(("parts", "passes"), [(1, 0), (2, 1), (3, 2), (8, 3)])
def test_boxes_are_cut_by_one_pass_for_each_doubling(parts, passes):
    rows = scene("two")[1].long()
    with mock.patch.object(torch, "bincount", side_effect=torch.bincount) as counts:
        bisected(rows, parts, (0, 1, 1, 1), (1, 2, 2, 2), None, False)
    assert counts.call_count == passes


def test_equal_samples_are_cut_apart():
    rows = torch.cartesian_prod(torch.arange(2), torch.arange(100), torch.arange(100))
    first, second = bisected(rows, 2, (0, 1, 1), (1, 1, 1), None, False)
    assert (first.low[0], first.end[0]) == (-END, 1)
    assert second.low == (1, -END, -END)


def copied(rank, size, group):
    """What a layer gives of a scene and of its copy; of all ranks, as a group is not copied."""
    whole = SparseTensor(*scene("two"))
    found = conv(4, 3, cls=SubMConv3d).requires_grad_(False)(shard_voxels(whole, rank, size))
    return [conv(2, 3, channels=4)(x).F.detach() for x in (found, copy.deepcopy(found))]


def test_scenes_are_copied():
    for ours, of_copy in run(copied, EVERYONE):
        assert ours.equal(of_copy)


def test_one_rank_keeps_the_tensor():
    tensor = whole_scene("two")
    assert shard_voxels(tensor, 0, 1) is tensor
    with pytest.raises(ShapeError, match=r"this process is rank 0 of 1"):
        shard_voxels(tensor, 1, 2)
