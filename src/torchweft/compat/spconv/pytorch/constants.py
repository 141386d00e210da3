"""What spconv reads of torch."""

import torch

__all__ = ["PYTORCH_VERSION", "is_amp_enabled"]

PYTORCH_VERSION = [int(n) for n in torch.__version__.split(".")[:2]]
"""Major and minor number of torch."""

is_amp_enabled = torch.is_autocast_enabled
