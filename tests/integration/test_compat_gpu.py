"""What only a GPU shows of the stand-ins: a network whose maps are kept does not wait.

Seen red with: rows compared at every layer.
"""

import pytest
import torch

from tests import spconvs
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
        torch.cuda.set_sync_debug_mode("error")
        try:
            net(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
