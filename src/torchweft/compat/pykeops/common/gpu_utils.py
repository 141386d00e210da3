"""The GPUs of this machine."""

import torch

__all__ = ["get_gpu_number"]


def get_gpu_number() -> int:
    """How many GPUs there are."""
    return torch.cuda.device_count()
