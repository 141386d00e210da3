"""DDP and FSDP2 around every module of every family: two steps are those of one process.

Seen red with: NumPy's views of operands, which keep FSDP2 from freeing parameters; gradients that
are summed where they are averaged.
"""

import functools
import traceback

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from tests.conftest import INTERPRETED
from tests.distributed import modules
from tests.distributed.modules import CASES, FAMILIES, batch, build
from tests.nearness import check_named
from tests.ranks import DEVICE_TYPE, run
from tests.ranks import SIZE as EVERYONE
from torchweft.voxels import (
    SparseBatchNorm,
    SparseModule,
    SparseSequential,
    SparseTensor,
    SubMConv3d,
)

if INTERPRETED:
    pytest.skip("the CPU's own executors compute these", allow_module_level=True)

SIZE = 2


def loss(out):
    """A function of every result, summed over rows, so that batches add up."""
    leaves = _pytree.tree_leaves(out)
    return sum(o.sin().sum() for o in leaves if o.is_floating_point())


def two_steps(model, batches, factor=1):
    """Parameters and their last gradients by name, after two steps of plain descent.

    Steps are short: long ones end where gradients are huge, and errors grow with them.
    """
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (factor * sum(loss(model(*one)) for one in batches)).backward()
        optimizer.step()
    return {
        kind + name_in(name): whole(value)
        for name, p in model.named_parameters()
        for kind, value in (("", p), ("gradient of ", p.grad))
    }


def name_in(name):
    """A parameter's name without those of what is around its module."""
    return name.replace("_orig_mod.", "").removeprefix("module.module.").removeprefix("module.")


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def sharded(module, group):
    """The layer by itself, then what is around it; of voxels all at once, for the features."""
    mesh = DeviceMesh.from_group(group, DEVICE_TYPE)
    if list(module.module.parameters()) and not isinstance(module.module, SparseModule):
        fully_shard(module.module, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def replicated(module, group):
    return DistributedDataParallel(module, process_group=group)


WAYS = {
    "DDP": replicated,
    "FSDP2": sharded,
    "compiled DDP": lambda module, group: compiled(replicated(module, group)),
    "compiled FSDP2": lambda module, group: compiled(sharded(module, group)),
}


def on_ranks(rank, size, group, names, way):
    """What each rank has; both average over ranks what is summed here."""
    found = {}
    for name in names:
        try:
            torch.compiler.reset()
            model = WAYS[way](build(name), group)
            found[name] = two_steps(model, [batch(name, rank)], size)
        except Exception:  # noqa: BLE001
            found[name] = traceback.format_exc()
    return found


@functools.cache
def of_one_process(name, seed=None):
    return two_steps(build(name, seed), [batch(name, rank, seed) for rank in range(SIZE)])


def check(names, way):
    found, errors = run(on_ranks, SIZE, names, way), []
    for rank, by_name in enumerate(found):
        for name in names:
            try:
                assert not isinstance(by_name[name], str), by_name[name]
                draw = functools.partial(of_one_process, name)
                check_named(by_name[name], of_one_process(name), draw)
            except AssertionError as error:  # all modules are tried
                errors.append(f"{name}, {way}, rank {rank}: {error}")
    assert not errors, "\n\n".join(errors)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_two_steps_are_those_of_one_process(way, family):
    check(list(FAMILIES[family]), way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compiled DDP", "compiled FSDP2"])
def test_two_steps_of_compiled_modules(way):
    check(["Linear", "CliffordLayer", "product"], way)


def norm():
    """A batch norm between layers, whose statistics are those of all ranks."""
    torch.manual_seed(0)
    first, last = SubMConv3d(2, 4, 3), SubMConv3d(4, 2, 1)
    return SparseSequential(first, SparseBatchNorm(4), torch.nn.ReLU(), last).double()


def joined(batches):
    """Clouds as the samples of one batch."""
    rows = [x.C + torch.tensor([n, 0, 0, 0], dtype=torch.int32) for n, (x,) in enumerate(batches)]
    feats = torch.cat([x.feats for (x,) in batches])
    box = [max(sizes) for sizes in zip(*(x.spatial_shape for (x,) in batches), strict=True)]
    return [(SparseTensor(feats, torch.cat(rows), box, len(batches)),)]


def norm_on_ranks(rank, size, group):
    model = replicated(norm(), group)
    return two_steps(model, [batch("SubMConv3d", rank)], size)


def test_batch_norms_of_all_ranks():
    """Every rank of the pool, since these norms know no group."""
    batches = [batch("SubMConv3d", rank) for rank in range(EVERYONE)]
    exact = two_steps(norm(), joined(batches))
    for found in run(norm_on_ranks, EVERYONE):
        torch.testing.assert_close(found, exact)


def test_no_module_is_left_out():
    known = CASES.keys() | modules.OF_OTHER_DIMENSIONS | modules.BASES | modules.OVER_RANKS
    assert modules.public_modules() <= known
