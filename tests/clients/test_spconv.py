"""The stand-in beside the real spconv on the CPU: the same networks, weights and tensors.

spconv's CPU layers have no backward and no implicit GEMM; one thread, since with more they race.
Errors are measured by the original's own: float32 against float64.
Seen red with: a kernel of one position read as (C_out, C_in), offsets of a kernel reversed.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn

pytest.importorskip("spconv")
from spconv import pytorch as original
from spconv.pytorch.utils import PointToVoxel

from tests import spconvs
from tests.clients.agreement import assert_agree
from torchweft.compat.spconv import pytorch as spconv

pytestmark = pytest.mark.filterwarnings("ignore")


def by_voxel(x):
    """Features in ascending order of the voxels, or a dense tensor as it is."""
    if isinstance(x, torch.Tensor):
        return {"dense": x.detach().double()}
    keys = x.indices.long()
    order = sorted(range(len(keys)), key=lambda n: keys[n].tolist())
    return {"indices": keys[order].double(), "features": x.features.detach()[order].double()}


def built(build, module):
    torch.manual_seed(0)
    return build(module).train()  # in eval the CPU wheel refuses a bias


def assert_same_as_original(build, **options):
    """The stand-in's results from the original's weights, and the other way round."""
    theirs, ours = built(build, original), built(build, spconv)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)  # drawn alike
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.5)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    results = {}
    for dtype in (torch.float32, torch.float64):
        for name, module, net in (("theirs", original, theirs), ("ours", spconv, ours)):
            x = spconvs.sample(module, dtype=dtype, **options)
            with torch.no_grad():
                results[name, dtype] = by_voxel(net.to(dtype)(x))
    exact, rounded = (results["theirs", d] for d in (torch.float64, torch.float32))
    for dtype in (torch.float64, torch.float32):
        assert_agree(results["ours", dtype], exact, rounded, dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("build", [spconvs.unet, spconvs.detector])
def test_networks(build, seed):
    assert_same_as_original(build, seed=seed)


LAYERS = [
    ("SubMConv", {"kernel_size": 3, "dilation": 2}),
    ("SubMConv", {"kernel_size": [1, 3, 5], "padding": 1}),
    ("SubMConv", {"kernel_size": 1}),
    ("SparseConv", {"kernel_size": 1}),
    ("SparseConv", {"kernel_size": 1, "stride": 2}),
    ("SparseConv", {"kernel_size": [3, 2, 4], "stride": [2, 1, 3], "padding": [1, 0, 2]}),
    ("SparseConv", {"kernel_size": 3, "dilation": 2, "padding": 1}),
    ("SparseConv", {"kernel_size": 3, "stride": 2, "padding": 1, "record_voxel_count": True}),
    ("SparseConvTranspose", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("SparseConvTranspose", {"kernel_size": [2, 3, 4], "stride": [1, 2, 3]}),
    ("SparseMaxPool", {"kernel_size": 2, "stride": 2}),
    ("SparseMaxPool", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("SparseMaxPool", {"kernel_size": 2}),
]


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_layers(kind, options, dim):
    sizes = {n: (v * 2)[:dim] if isinstance(v, list) else v for n, v in options.items()}

    def build(module):
        layer = getattr(module, f"{kind}{dim}d")
        if "Pool" not in kind:
            return layer(3, 4, **sizes)
        return module.SparseSequential(nn.ReLU(), layer(**sizes))  # on a CPU theirs start at 0

    assert_same_as_original(build, shape=(9, 7, 6, 5)[:dim])


def test_inverse_of_a_pool():
    def build(module):
        return module.SparseSequential(
            nn.ReLU(),
            module.SparseMaxPool3d(3, 2, 1, indice_key="pool"),
            module.SparseInverseConv3d(3, 4, 3, "pool"),
        )

    assert_same_as_original(build)


def test_pairs():
    """Tables that programs read from find_indice_pair hold the same pairs."""
    found = []
    for module in (original, spconv):
        x = spconvs.sample(module, dtype=torch.float32)
        down = module.SparseConv3d(3, 4, 3, 2, 1, indice_key="down", algo=original.ConvAlgo.Native)
        y = down(x)
        data = y.find_indice_pair("down")
        pairs, counts = data.indice_pairs, data.indice_pair_num
        assert pairs.shape == (2, 27, len(x.indices))
        meeting = {
            (k, *x.indices[i].tolist(), *y.indices[o].tolist())
            for k, count in enumerate(counts.tolist())
            for i, o in pairs[:, k, :count].T.tolist()
        }
        sizes = data.ksize, data.stride, data.padding, data.dilation
        found.append((meeting, counts.tolist(), sizes, data.spatial_shape, data.out_spatial_shape))
    assert found[0] == found[1]


def test_sums_of_different_voxels():
    results = []
    for module in (original, spconv):
        a, b = (spconvs.sample(module, seed=s, dtype=torch.float64) for s in (0, 1))
        results.append(by_voxel(module.functional.sparse_add(a, b)))
    assert_agree(results[1], results[0], results[0])


def test_every_public_name_is_there():
    """Or raises NotImplementedError; what the original imports from elsewhere does not count."""
    names = ["", ".conv", ".core", ".functional", ".modules", ".ops", ".pool", ".tables", ".utils"]
    for space in names:
        theirs, ours = original, spconv
        for part in space.split(".")[1:]:
            theirs, ours = getattr(theirs, part), getattr(ours, part)
        for name, value in vars(theirs).items():
            home = getattr(value, "__module__", None) or ""
            if name.startswith("_") or not home.startswith(f"spconv.pytorch{space}"):
                continue
            with contextlib.suppress(NotImplementedError):  # which says the nearest way
                getattr(ours, name)


@pytest.mark.parametrize("max_voxels", [20, 4000])
def test_points_to_voxels(max_voxels):
    torch.manual_seed(0)
    size = torch.tensor([0.5, 0.25, 1.0])
    cells = torch.randint(-2, 12, (3000, 3))  # some are outside
    places = (cells + 0.1 + 0.8 * torch.rand(3000, 3)) * size  # none is near a face
    pc = torch.cat([places, torch.rand(3000, 2)], 1)
    box = [0.0, 0.0, 0.0, 5.0, 2.5, 10.0]
    given = size.tolist(), box, 5, max_voxels, 3
    theirs, ours = PointToVoxel(*given), spconv.utils.PointToVoxel(*given)
    results = zip(theirs.generate_voxel_with_id(pc), ours.generate_voxel_with_id(pc), strict=True)
    for a, b in results:
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert list(theirs.grid_size) == ours.grid_size
