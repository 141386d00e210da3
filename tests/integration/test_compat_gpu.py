"""What only a GPU shows of the stand-ins: a network whose maps are kept does not wait.

Seen red with: rows compared at every layer.
"""

import pytest
import torch

from tests import spconvs
from torchweft.compat.spconv import pytorch as spconv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_host_does_not_wait_once_maps_are_kept(mode):
    net = spconvs.unet(spconv).cuda()
    x = spconvs.sample(spconv, dtype=torch.float32, device="cuda")
    with mode():
        net(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            net(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
