"""Switches that programs set.  Only `allow_tf32` has an effect: float32 products in TF32."""

import torch

__all__ = ["allow_fp16", "allow_tf32", "benchmark", "device_capability", "hash_rsv_ratio", "init"]

benchmark = False
allow_tf32 = False
allow_fp16 = True
hash_rsv_ratio = 2
device_capability = 0


def init() -> None:
    """Read the GPU's compute capability, ten thousand times 1.0 of it being 100; 0 without one."""
    global device_capability
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device_capability = 100 * major + 10 * minor
