"""Caches by the path that programs import them from."""

from torchweft.compat.torchsparse.caches import *  # noqa: F403
from torchweft.compat.torchsparse.caches import __all__ as __all__
