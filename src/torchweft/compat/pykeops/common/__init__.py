"""What programs import of the code that pykeops' torch and numpy modules share."""

from torchweft.compat.pykeops.common import gpu_utils, lazy_tensor, operations, utils

__all__ = ["gpu_utils", "lazy_tensor", "operations", "utils"]
