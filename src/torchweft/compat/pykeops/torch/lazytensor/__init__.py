"""Lazy tensors, for tensors of torch, by the path of their module."""

from torchweft.compat.pykeops.torch.lazytensor import LazyTensor

__all__ = ["LazyTensor"]
