"""spconv's Identity, a module on anything."""

from torch.nn import Identity

__all__ = ["Identity"]
