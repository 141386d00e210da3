"""A training step of voxels from disk: another process finds all of its code, without Triton.

Seen red with: a kernel that is imported, counts of voxels that make other keys.
"""

import importlib
import subprocess
import sys

import pytest

from tests.conftest import INTERPRETED
from tests.contract.some_kernel import a_process
from torchweft.core.gpu import binaries
from torchweft.core.operators.call_cache import CallCache
from torchweft.voxels.convolution import launch
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.gpu import tiles as preparation

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

STEP = """
import importlib
import torch
from torchweft.voxels import SparseTensor, sparse_conv
for name in ("coordinates", "kernel_map", "packing"):
    importlib.import_module(f"torchweft.voxels.maps.{name}").kernels_serve = lambda device: True
functions = importlib.import_module("torchweft.voxels.convolution.functions")
functions._serving = lambda backend, device: "triton"
functions._checked_calls.clear()
count = COUNT
at = torch.arange(count)
coords = torch.stack([at * 0, at // 4096, at // 64 % 64, at % 64], 1).int()
feats = torch.zeros(count, 16).half().requires_grad_()
weight = torch.zeros(27, 16, 16).half().requires_grad_()
y = sparse_conv(SparseTensor(feats, coords, (64, 64, 64), 1), weight, 3).feats
y.backward(y.detach())
"""

ALONE = """
import sys
import torch
from torchweft.core import private
private.get_device = lambda: 0
from tests.contract.absent_gpu import without_triton
driver = without_triton(setattr)
{step}
assert "triton" not in sys.modules
print(sorted(name for name, code in driver.loaded))
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    caches = preparation._tile_kernels, launch._convolvers, launch._differentiators
    clears = [preparation.kernel_for.cache_clear, *(cache.clear for cache in caches)]
    for clear in clears:
        clear()
    monkeypatch.setattr(launch, "_compiled_layers", set())
    monkeypatch.setattr(map_launch, "_compiled_maps", set())
    for name in ("coordinates", "kernel_map", "packing"):
        module = importlib.import_module(f"torchweft.voxels.maps.{name}")
        monkeypatch.setattr(module, "kernels_serve", module.kernels_serve)
    ops = importlib.import_module("torchweft.voxels.convolution.functions")
    monkeypatch.setattr(ops, "_serving", ops._serving)
    monkeypatch.setattr(ops, "_checked_calls", CallCache())
    monkeypatch.setattr(binaries, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(binaries, "as_loaded", {})
    yield from a_process(monkeypatch, tmp_path)
    for clear in clears:
        clear()


def test_a_process_that_finds_its_code_does_not_import_triton(driver):
    exec(STEP.replace("COUNT", "1003"), {})
    names = sorted(name for name, _ in driver.loaded)
    assert len(names) > 10
    step = STEP.replace("COUNT", "1600")
    command = [sys.executable, "-c", ALONE.format(step=step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(names)
