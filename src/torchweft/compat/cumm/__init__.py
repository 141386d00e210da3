"""cumm's `tensorview.from_numpy`, through which programs hand arrays to spconv's generators."""

from torchweft.compat.cumm import tensorview

__all__ = ["tensorview"]
