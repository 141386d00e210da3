"""MinkowskiEngine.modules: blocks of residual networks."""

from torchweft.compat.MinkowskiEngine.modules import resnet_block, senet_block

__all__ = ["resnet_block", "senet_block"]
