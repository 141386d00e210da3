"""Sizes, quantization, collation, caches."""

from torchweft.compat.torchsparse.sizes import make_divisible, make_ntuple, make_tensor
from torchweft.compat.torchsparse.utils import collate, quantize, tensor_cache, tune
from torchweft.compat.torchsparse.utils.to_dense import to_dense

__all__ = [
    "collate",
    "make_divisible",
    "make_ntuple",
    "make_tensor",
    "quantize",
    "tensor_cache",
    "to_dense",
    "tune",
]
