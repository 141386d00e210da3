"""Reductions of formula strings, for tensors of torch, by the paths of their modules."""

from torchweft.compat.pykeops.torch.generic import generic_ops, generic_red

__all__ = ["generic_ops", "generic_red"]
