"""torch.distributed.checkpoint: what two ranks saved goes on in one process and on three ranks.

Seen red with: an optimizer that is not loaded.
"""

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.conftest import INTERPRETED
from tests.distributed.modules import batch, build
from tests.distributed.test_training import loss, sharded, whole
from tests.ranks import DEVICE_TYPE, run

if INTERPRETED:
    pytest.skip("the CPU's own executors compute these", allow_module_level=True)

NAMES = ["Linear", "SymmetricContraction", "CliffordLayer", "SparseLayerNorm", "reduction"]


class Several(nn.Module):
    """Layers of several families side by side."""

    def __init__(self):
        super().__init__()
        self.module = nn.ModuleDict({name: build(name) for name in NAMES})

    def forward(self, batches):
        return [self.module[name](*one) for name, one in batches.items()]


def made(size, group):
    """A model, cut over the ranks where there are several, and its optimizer."""
    model = Several()
    if size > 1:
        for block in model.module.values():
            sharded(block, group)
        fully_shard(model, mesh=DeviceMesh.from_group(group, DEVICE_TYPE))
    return model, torch.optim.Adam(model.parameters(), 0.1)


def step(model, optimizer):
    """One step; every rank has the same batch, so the mean over ranks is the gradient of one."""
    optimizer.zero_grad()
    loss(model({name: batch(name, 0) for name in NAMES})).backward()
    optimizer.step()
    return {name: whole(p) for name, p in model.named_parameters()}


def save(rank, size, group, folder):
    model, optimizer = made(size, group)
    for _ in range(2):
        step(model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    checkpoint.save(state, checkpoint_id=folder, process_group=group)


def load(rank, size, group, folder):
    model, optimizer = made(size, group)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return step(model, optimizer)


def test_two_ranks_go_on_as_one_and_as_three(tmp_path):
    run(save, 2, str(tmp_path))
    model, optimizer = made(1, None)
    for _ in range(3):
        exact = step(model, optimizer)
    for size in (1, 3):
        for found in run(load, size, str(tmp_path)):
            torch.testing.assert_close(found, exact)
