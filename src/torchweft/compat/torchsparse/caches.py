"""What layers keep with a tensor, its own or one for the whole program."""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = [
    "TensorCache",
    "TensorCacheMode",
    "clear_global_tensor_cache",
    "get_global_tensor_cache",
    "get_tensor_cache_mode",
    "new_tensor_cache",
    "set_global_tensor_cache",
    "set_tensor_cache_mode",
]


class TensorCacheMode(Enum):
    """Whether new tensors have caches of their own."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class TensorCache:
    """cmaps: (coords, spatial_range) by stride; kmaps: maps by (stride, kernel, stride, dilation).

    A map is used only for the voxels that it was built for.  Programs keep more attributes here.
    """

    def __init__(self) -> None:
        self.cmaps: dict[tuple[int, ...], Any] = {}
        self.kmaps: dict[tuple[Any, ...], Any] = {}
        self.hashmaps: dict[tuple[int, ...], Any] = {}


_mode = TensorCacheMode.SEPARATE_TENSOR_CACHE
_global: TensorCache | None = None


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    """With GLOBAL_TENSOR_CACHE, new tensors share one cache until it is cleared."""
    global _mode
    _mode = TensorCacheMode(mode)


def get_tensor_cache_mode() -> TensorCacheMode:
    """The mode of new tensors."""
    return _mode


def get_global_tensor_cache() -> TensorCache | None:
    """The cache that new tensors share in the global mode; None before the first."""
    return _global


def set_global_tensor_cache(tensor_cache: TensorCache | None) -> None:
    """Replace the shared cache."""
    global _global
    _global = tensor_cache


def clear_global_tensor_cache() -> None:
    """Drop the shared cache, after each step."""
    set_global_tensor_cache(None)


def new_tensor_cache() -> TensorCache:
    """The cache of a new tensor, by the mode."""
    if _mode is TensorCacheMode.SEPARATE_TENSOR_CACHE:
        return TensorCache()
    if _global is None:
        set_global_tensor_cache(TensorCache())
    assert _global is not None  # set above
    return _global
