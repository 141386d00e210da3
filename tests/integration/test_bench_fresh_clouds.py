"""benchmarks.fresh_clouds on a small cloud, where the CPU stands for a GPU and ours for spconv."""

import json
import sys

import pytest
import torch

import torchweft
from benchmarks import fresh_clouds
from benchmarks.harness.programs import _clouds
from benchmarks.workloads import spunet, voxels_unet
from examples.voxels.plot_minkunet import MinkUNet
from tests.recorders import captured
from torchweft.compat import spconv
from torchweft.voxels import SparseTensor


@pytest.fixture
def small(monkeypatch):
    for owner in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(owner, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("kernels", "waits"):
        monkeypatch.setattr(fresh_clouds, name, lambda call: (call(), 7)[1])
    machine = fresh_clouds.machine
    monkeypatch.setattr(fresh_clouds, "machine", lambda device: machine(torch.device("cpu")))
    monkeypatch.setattr(fresh_clouds, "WARM", 0)
    monkeypatch.setattr(fresh_clouds, "REPEATS", 1)
    monkeypatch.setattr(fresh_clouds, "LEFT_OUT", (0, 2))
    made = torch.Generator().manual_seed(0)
    voxels = torch.randint(0, 64, (300, 3), generator=made).unique(dim=0)
    monkeypatch.setattr(fresh_clouds, "CLOUDS", {"lidar05": lambda: (voxels, (64, 64, 64))})
    monkeypatch.setattr(fresh_clouds, "PEERS", {"ours": fresh_clouds.STAND_IN})
    monkeypatch.setattr(spconv, "__version__", "2", raising=False)
    monkeypatch.setattr(spunet, "CHANNELS", tuple(c // 16 for c in spunet.CHANNELS))


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_network_of_spconv(tmp_path, monkeypatch):
    """All ways are measured, and networks of one state dict give the same scores."""
    out = tmp_path / "fresh.json"
    monkeypatch.setattr(sys, "argv", ["", "--network", "SpUNet under", "--out", str(out)])
    fresh_clouds.main()
    found = json.loads(out.read_text())
    (network,) = found["networks"].values()
    assert network["difference"] == {"ours": 0.0}
    ways = {"fresh", "padded", "kept", "captured", "ours"}
    assert network["ms"].keys() == {"maps", "training step"}
    assert network["ms"]["training step"].keys() == ways
    assert all(ms > 0 for of in network["ms"].values() for ms in of.values())
    page = _clouds(found)
    assert "| SpUNet under autocast, ms | fresh cloud | fresh, captured | maps kept |" in page
    assert "| kernels of a forward pass | 7 |  | 7 |  |  |" in page


def test_a_graph_for_all_clouds(monkeypatch):
    """Its scores are those of the network with the weights that are given."""
    monkeypatch.setattr(
        torchweft, "capture", lambda *given, sizes: captured(*given, sizes=sizes)[0]
    )
    made = torch.Generator().manual_seed(0)
    model = MinkUNet(4, 3, 14, 0.1).eval()
    vectors = [voxels_unet.flat(group.values()).detach() for group in voxels_unet.groups(model)]

    def cloud(feats):
        rows = torch.randint(0, 40, (len(feats), 3), generator=made.manual_seed(len(feats)))
        coords = torch.nn.functional.pad(rows.unique(dim=0), (1, 0))
        return SparseTensor(feats[: len(coords)], coords, (40, 40, 40), 1)

    run = voxels_unet.for_all_clouds(model, cloud)
    with torch.no_grad():
        for count in (300, 310, 290, 305):
            feats = torch.randn(count, 4)
            found, exact = run(feats, *vectors), model(cloud(feats)).feats
            torch.testing.assert_close(found, exact, rtol=0, atol=0)
