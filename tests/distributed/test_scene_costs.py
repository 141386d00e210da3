"""What a step on one scene over ranks costs: collectives, waits of the host, pairs of voxels.

Seen red with: an exchange where no rank reads voxels of another, numbers that the host reads at
every call, calls of layers that are compared on every scene, pairs that two ranks compute, maps
that are built one by one.
"""

import contextlib
import sys
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.test_scenes import network_of, score, whole_scene
from tests.ranks import ON_GPUS, run
from torchweft import voxels
from torchweft.distributed import shard_voxels
from torchweft.distributed.scenes import functions, slabs

READS = ("_local_scalar_dense", "nonzero", "unique", "bincount", "is_nonzero")
"""Operations of torch for which the host waits for a GPU; and `tolist`."""
COLLECTIVES = ("allreduce", "allgather", "exchange")

NORMS = 4
BESIDE = 6
"""Layers that read voxels of other ranks: all but `down` and `undown`, whose kernel is their
stride."""
MAPS, MAPS_BESIDE = 6, 5
"""Maps of three levels, of two layers down and of one up, that read voxels of other ranks but one:
`down`, whose map is that of `undown` as well."""
TOGETHER = 2
"""Maps beside that are known before any is built: of the levels before `deep`, whose outputs
another rank's voxels determine."""


class Watch(TorchDispatchMode):
    """Counts collectives, and reads of numbers that stand on the device."""

    def __init__(self):
        super().__init__()
        self.reads, self.collectives = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.reads.update(part for part in READS if part in name)
        self.collectives.update(part for part in COLLECTIVES if part in name)
        return function(*args, **(kwargs or {}))

    def tolist(self, tensor):
        """Of scenes alone: agreements read the host's own numbers, maps of a GPU their flags."""
        if sys._getframe(2).f_globals["__name__"] == slabs.__name__:
            self.reads["tolist"] += 1
        return _TOLIST(tensor)


_TOLIST = torch.Tensor.tolist


@contextlib.contextmanager
def watched():
    watch = Watch()
    with mock.patch.object(torch.Tensor, "tolist", lambda t: watch.tolist(t)), watch:
        yield watch


def cost(network, tensor):
    """(collectives, reads) of a training step."""
    tensor = tensor.replace(tensor.F.detach().requires_grad_())
    network.zero_grad()
    with watched() as watch:
        score(network(tensor)).backward()
    return dict(watch.collectives), dict(watch.reads)


def steps_of_rank(rank, size, group):
    """Costs of a step on a new scene, of one more on it, and of one on the next; pairs of maps."""

    def new():
        return shard_voxels(whole_scene("two"), rank, size, block=4, group=group)

    network = network_of("torch")
    new()  # without calls of layers, of which none are foreseen on the next scene
    first = new()
    return [cost(network, first), cost(network, first), cost(network, new())], pairs(first)


def counted(*layers):
    """Reads of how many outputs layers have whose maps kernels build one by one."""
    return {"_local_scalar_dense": len(layers)} if ON_GPUS else {}


def pairs(tensor):
    """Pairs of voxels that meet in layers of all kinds."""
    layers = [(3, 1, True), (1, 1, True), (2, 2, False), (3, 2, False)]
    maps = [
        voxels.kernel_map(tensor, kernel_size=k, stride=s, submanifold=sub) for k, s, sub in layers
    ]
    return [int(each.counts.sum()) for each in (*maps, *[m.transpose() for m in maps])]


def test_collectives_and_waits_of_a_step():
    ranks = run(steps_of_rank, 2)
    whole = pairs(whole_scene("two"))
    for ((fresh, reads), (again, late), (foreseen, fewer)), _ in ranks:
        assert late == {}
        assert again == {"allreduce": 2 * NORMS + BESIDE, "exchange": 2 * BESIDE}
        told = MAPS + MAPS_BESIDE  # what a map is, and how many voxels go to whom
        assert fresh == {
            "allreduce": again["allreduce"] + told,
            "exchange": again["exchange"] + MAPS_BESIDE,
        }
        exchanges = MAPS_BESIDE - TOGETHER + 1
        assert foreseen == {
            "allreduce": 2 * NORMS + MAPS + exchanges,  # of calls, those for maps are compared
            "exchange": again["exchange"] + exchanges,
        }
        outputs = {"nonzero": 1}  # the host learns how many outputs of `deep` are its own
        assert reads == outputs | {"tolist": MAPS_BESIDE} | counted("down", "deep")
        assert fewer == outputs | {"tolist": exchanges} | counted("deep")
    of_ranks = [part for _, part in ranks]
    assert [sum(parts) for parts in zip(*of_ranks, strict=True)] == whole
    assert all(max(parts) < 2 * total / 3 for *parts, total in zip(*of_ranks, whole, strict=True))


def forgetful_ranks(rank, size, group):
    """The cost of a step where one rank alone knows what the last scene's layers asked for."""
    network = network_of("torch")
    for forgets in (False, True):
        if forgets and rank:
            functions._last.clear()
        scene = shard_voxels(whole_scene("two"), rank, size, block=4, group=group)
        found = cost(network, scene)
    return found


def test_nothing_is_foreseen_where_ranks_know_of_other_calls():
    for collectives, _ in run(forgetful_ranks, 2):
        assert collectives == {
            "allreduce": 2 * NORMS + BESIDE + MAPS + MAPS_BESIDE,
            "exchange": 2 * BESIDE + MAPS_BESIDE,
        }
