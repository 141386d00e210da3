"""Options of other projects' networks: which have a counterpart here, and which must be what.

An option is read off the original's modules, or given as the arguments that it was built with.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchweft.errors import ShapeError

__all__ = ["CEGNN", "CLIFFORDLAYERS", "GATR", "LGATR", "Origin", "checked", "configuration_of"]


class Origin(NamedTuple):
    """A project's options.

    Args:
        name: of the project.
        hidden: those that a state dict does not show, for messages.
        fixed: options that must have a value, and the value.
        kept: options with a counterpart: its name here, and the original's default.
        shown: options that a state dict shows, or that change no results.
    """

    name: str
    hidden: str
    fixed: Mapping[str, Any]
    kept: Mapping[str, tuple[str, Any]]
    shown: frozenset[str]


_SHOWN = (
    "mv_channels s_channels in_mv_channels out_mv_channels in_s_channels out_s_channels "
    "hidden_mv_channels hidden_s_channels num_blocks multi_query output_init dropout_prob "
    "checkpoint checkpoint_blocks pos_enc_base naive_amp compile compile_kwargs "
    "activation_memory_budget norm_elementwise_affine sparse_gp sparse_linear subgroup "
    "use_fully_connected_subgroup geometric_product use_geometric_product"
)
_CEGNN_SHOWN = (
    "in_features hidden_features out_features edge_attr_features node_attr_features channels "
    "features exclude_dual include_first_order normalization_init n_layers subspaces"
)
_CONVOLUTION_SHOWN = "in_channels out_channels kernel_size stride padding dilation bias g"
_TRANSFORMER = {
    "additional_qk_mv_channels": 0,
    "additional_qk_s_channels": 0,
    "reinsert_mv_channels": None,
    "reinsert_s_channels": None,
}
_KEPT = {"num_heads": ("heads", 8), "activation": ("activation", "gelu")}

GATR = Origin(
    "GATr",
    "the activation, the number of heads and what enters attention",
    _TRANSFORMER | {"normalizer_eps": 1e-3, "pos_encoding": False, "increase_hidden_channels": 2},
    _KEPT,
    frozenset(_SHOWN.split()),
)
LGATR = Origin(
    "L-GATr",
    "the activation, the number of heads and what enters attention",
    _TRANSFORMER
    | {"head_scale": False, "num_hidden_layers": 1, "num_layers_mlp": 2, "attn_ratio": 1}
    | {"mlp_ratio": 4, "bivector": True, "use_bivector": True}
    | {"attention increase_hidden_channels": 1, "mlp increase_hidden_channels": 4},
    {**_KEPT, "nonlinearity": ("activation", "gelu")},
    frozenset(_SHOWN.split()),
)
CEGNN = Origin(
    "CEGNN",
    "the invariant of its gates",
    {"invariant": "mag2", "residual": True},
    {},
    frozenset(_CEGNN_SHOWN.split()),
)
CLIFFORDLAYERS = Origin(
    "cliffordlayers",
    "groups, whose channels it groups otherwise",
    {"groups": 1, "rotation": False, "padding_mode": "zeros"},
    {},
    frozenset(_CONVOLUTION_SHOWN.split()),
)

_READ = {
    "MVSiLU": ("invariant",),
    "EGCL": ("residual",),
    "CliffordConv1d": ("groups", "rotation", "padding_mode"),
    "CliffordConv2d": ("groups", "rotation", "padding_mode"),
    "CliffordConv3d": ("groups", "rotation", "padding_mode"),
}
"""Options that the original's modules keep as attributes, by class."""


def configuration_of(module: nn.Module, origin: Origin) -> list[Mapping[str, Any]]:
    """The options of a module and of those in it."""
    found: list[Mapping[str, Any]] = []
    for part in module.modules():
        kind = type(part).__name__
        found += [{name: getattr(part, name)} for name in _READ.get(kind, ())]
        for name in ("nonlinearity", "scalar_nonlinearity"):  # a function of torch, or a partial
            function = getattr(part, name, None)
            if kind == "ScalarGatedNonlinearity" and function is not None:
                found.append({"activation": getattr(function, "func", function).__name__})
        for name in ("config", "primitives"):
            config = getattr(part, name, None)
            if dataclasses.is_dataclass(config) and not isinstance(config, type):
                section = "mlp" if "MLP" in type(config).__name__ else "attention"
                found.append({section: dataclasses.asdict(config)})
        for name in ("reinsert_mv_channels", "reinsert_s_channels"):
            if hasattr(part, f"_{name}"):
                found.append({name: getattr(part, f"_{name}")})
    if origin is LGATR:  # version 1 keeps some of them for the whole process
        loaded = sys.modules.get("lgatr.primitives.config")
        config = getattr(loaded, "gatr_config", None)
        found += [] if config is None else [dataclasses.asdict(config)]
    return found


def checked(given: Sequence[Mapping[str, Any]], origin: Origin) -> dict[str, Any]:
    """The options with a counterpart, under its name.

    Raises:
        ShapeError: another option has no counterpart, or is not known.
    """
    found: dict[str, Any] = dict(origin.kept.values())
    for path, value in (pair for part in given for pair in _flat(part)):
        option = path.split(" ")[-1]
        if option in origin.kept:
            found[origin.kept[option][0]] = value
            continue
        required = origin.fixed.get(path, origin.fixed.get(option, value))
        known = {*origin.fixed, *origin.shown}
        if value != required or not {path, option} & known:
            needs = f"it must be {required!r}" if value != required else "the option is not known"
            raise ShapeError(
                f"{path} is {value!r} in this configuration of {origin.name}: {needs}, the "
                "original computes what torchweft has no layer for. Keep the original, or train "
                "a network without it."
            )
    return found


def _flat(part: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """("attention num_heads", 8), … of nested options."""
    for name, value in part.items():
        path = f"{section} {name}".strip()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(value, Mapping) and name in ("attention", "mlp", "primitives"):
            yield from _flat(value, path)
        else:
            yield path, value
