"""Launches of a training step of GATr and of L-GATr: of one block, as a GPU makes them.

A launch is a kernel of ours or an operation of torch that computes; views, and memory that is only
reserved, are none.  Attention is one, its gradient the seven products that the CPU makes of it.
Before maps of one input were one operator, a block of GATr had 455, of L-GATr 406.  Ten copy the
matrices of linear maps as tensor cores read them.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.conftest import INTERPRETED
from torchweft.clifford import LGATR_2, GATr, LGATr
from torchweft.core.gpu.launcher import Kernel

pytestmark = pytest.mark.kernels

MOST = {"gatr": 127, "lgatr": 145}
NETWORKS = {
    "gatr": lambda blocks: GATr(1, 1, 16, 1, 1, 32, blocks, 4, backend="triton"),
    "lgatr": lambda blocks: LGATr(
        1, 1, 16, 1, 1, 32, blocks, 4, activation="gelu_tanh", options=LGATR_2, backend="triton"
    ),
}
COMPUTING = (
    "add", "add_", "addmm", "addmm_", "cat", "clone", "copy_", "exp", "fill_", "gelu",
    "gelu_backward", "index_select", "index_add", "mm", "bmm", "mul", "sum", "slice_backward",
    "native_layer_norm", "native_layer_norm_backward", "index_select_backward", "zero_",
    "_softmax_backward_data",
)  # fmt: skip
ATTENTION = "_scaled_dot_product_attention_math"


def step(network):
    """A training step without the update of the parameters."""
    network.zero_grad()
    x, scalars = network(torch.ones(16, 2, 5, 1), torch.ones(2, 5, 1))
    (x.square().sum() + scalars.square().sum()).backward()


def launches(network):
    """Number of launches of a step."""
    step(network)  # makes the tables
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, record_shapes=True) as found:
        step(network)
    return sum(map(_count, found.events()))


def _count(event):
    name = event.name.removeprefix("aten::")
    inside = event.cpu_parent
    while inside is not None:
        if inside.name.removeprefix("aten::") in (*COMPUTING, ATTENTION) or _is_kernel(inside):
            return 0  # a part of one that is counted
        inside = inside.cpu_parent
    shapes = [shape for shape in event.input_shapes if shape]
    empty = bool(shapes) and all(0 in shape for shape in shapes)
    computing = name == ATTENTION or (name in COMPUTING and not empty)
    return int(computing or _is_kernel(event))


def _is_kernel(event):
    return event.name.startswith("KERNEL ")


if INTERPRETED:

    @pytest.fixture
    def named(monkeypatch):
        """Kernels are events of the profiler."""
        launch = Kernel.__call__

        def call(kernel, programs, *given):
            if programs:
                with record_function(f"KERNEL {kernel._kernel.__name__}"):
                    launch(kernel, programs, *given)

        monkeypatch.setattr(Kernel, "__call__", call)

    @pytest.mark.usefixtures("named")
    @pytest.mark.parametrize("name", NETWORKS)
    def test_launches_of_a_block(name):
        one, two = (launches(NETWORKS[name](blocks)) for blocks in (1, 2))
        assert two - one <= MOST[name]
