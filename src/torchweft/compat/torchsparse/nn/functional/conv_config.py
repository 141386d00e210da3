"""Configurations of convolutions: `kmap_mode` and `downsample_mode` choose the voxels.

All other fields choose among torchsparse's kernels and have no effect here.  A configuration is the
shared default until `set_global_conv_config` or a layer's `config=` gives another.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torchweft.errors import WeftError

__all__ = [
    "ConvConfig",
    "ConvMode",
    "Dataflow",
    "clear_global_conv_config",
    "get_conv_mode",
    "get_default_conv_config",
    "get_downsample_mode",
    "get_global_conv_config",
    "get_kmap_mode",
    "set_conv_mode",
    "set_downsample_mode",
    "set_global_conv_config",
    "set_kmap_mode",
]

KMAP_MODES = ("hashmap_on_the_fly", "hashmap")
DOWNSAMPLE_MODES = ("spconv", "minkowski")


class Dataflow(Enum):
    """How torchsparse multiplies."""

    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


class ConvMode(Enum):
    """How torchsparse sorts its maps."""

    mode0 = 0
    mode1 = 1
    mode2 = 2


class ConvConfig(dict[str, Any]):
    """A dictionary whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def copy(self) -> ConvConfig:
        """Another one with the same fields."""
        return type(self)(self)


_default = ConvConfig(
    dataflow=Dataflow.ImplicitGEMM,
    ifsort=False,
    kmap_mode="hashmap_on_the_fly",
    downsample_mode="spconv",
    split_mask_num=1,
    split_mask_num_bwd=3,
    epsilon=0.0,
    mm_thresh=0,
    FOD_fusion=True,
)
_global: ConvConfig | None = None
_named: dict[str, Any] = {
    "conv_mode": ConvMode.mode0,
    "kmap_mode": KMAP_MODES[0],
    "downsample_mode": DOWNSAMPLE_MODES[0],
}


def get_default_conv_config(
    conv_mode: ConvMode = ConvMode.mode0, training: bool = False
) -> ConvConfig:
    """The shared default, which may be written to; the arguments have no effect."""
    return _default


def get_global_conv_config() -> ConvConfig | None:
    """The configuration of layers without one; None is the default."""
    return _global


def set_global_conv_config(conv_config: ConvConfig) -> None:
    """Use a configuration in all layers without one; fields that it lacks are the default's."""
    global _global
    for name, value in _default.items():
        conv_config.setdefault(name, value)
    _global = conv_config


def clear_global_conv_config() -> None:
    """Use the default again."""
    global _global
    _global = None


def get_conv_mode() -> ConvMode:
    """What was set; it has no effect."""
    found: ConvMode = _named["conv_mode"]
    return found


def set_conv_mode(conv_mode: ConvMode | int) -> None:
    """Kept; it has no effect."""
    _named["conv_mode"] = ConvMode(conv_mode)


def get_kmap_mode() -> str:
    """What was set; see `set_kmap_mode`."""
    return str(_named["kmap_mode"])


def set_kmap_mode(kmap_mode: str) -> None:
    """Kept; it has no effect, as in torchsparse 2.1: a configuration's field has."""
    _named["kmap_mode"] = checked_mode("kmap_mode", kmap_mode, KMAP_MODES)


def get_downsample_mode() -> str:
    """What was set; see `set_downsample_mode`."""
    return str(_named["downsample_mode"])


def set_downsample_mode(downsample_mode: str) -> None:
    """Kept; it has no effect, as in torchsparse 2.1: a configuration's field has."""
    found = checked_mode("downsample_mode", downsample_mode, DOWNSAMPLE_MODES)
    _named["downsample_mode"] = found


def checked_mode(name: str, value: str, known: tuple[str, ...]) -> str:
    """The mode.

    Raises:
        WeftError: it is none of those known.
    """
    if value not in known:
        raise WeftError(
            f"{name} is {value!r}: it must be one of {', '.join(known)}. Pass {known[0]!r}."
        )
    return value
