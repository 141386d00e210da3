"""What only a GPU shows of the stand-ins: a network whose maps are kept does not wait.

Seen red with: rows compared at every layer.
"""

import pytest
import torch

from tests import minkowskis, spconvs
from tests.clients.agreement import assert_agree
from torchweft.capturing.graphs import waiting_raises
from torchweft.compat import MinkowskiEngine as ME  # noqa: N817 - its users' own habit
from torchweft.compat.spconv import pytorch as spconv
from torchweft.compat.torchsparse import SparseTensor, backbones

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def spconvs_unet():
    return spconvs.unet(spconv), spconvs.sample(spconv, dtype=torch.float32, device="cuda")


def torchsparses_unet():
    torch.manual_seed(0)
    coords = (torch.rand(2, 40, 34, 38) < 0.05).nonzero().int().cuda()
    feats = torch.randn(len(coords), 4, device="cuda")
    return backbones.SparseResUNet42(width_multiplier=0.25), SparseTensor(feats, coords)


@pytest.mark.parametrize("build", [spconvs_unet, torchsparses_unet])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_host_does_not_wait_once_maps_are_kept(mode, build):
    net, x = build()
    net = net.cuda()
    with mode():
        net(x)
        with waiting_raises():
            net(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("build", [minkowskis.unet, minkowskis.resnet])
def test_no_wait_in_networks_of_minkowski_engine(build, mode):
    net = build(ME).cuda()
    x = minkowskis.sample(ME, dtype=torch.float32, device="cuda")
    with mode():
        net(x)
        with waiting_raises():
            net(x)


@pytest.mark.parametrize(
    "build", [minkowskis.unet, minkowskis.resnet, minkowskis.completion, minkowskis.detector]
)
def test_networks_of_minkowski_engine_agree_with_the_cpu(build):
    exact = minkowskis.Run(ME, build)
    rounded = minkowskis.Run(ME, build, exact.network, torch.float32)
    found = minkowskis.Run(ME, build, exact.network, device="cuda")
    assert found.places == exact.places
    if rounded.places != exact.places:  # a score near its threshold, rounded
        rounded = exact
    assert_agree(found.found, exact.found, rounded.found)
