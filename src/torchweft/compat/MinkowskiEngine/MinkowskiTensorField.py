"""TensorField, by the name of the original's module."""

from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import TensorField

__all__ = ["TensorField"]
