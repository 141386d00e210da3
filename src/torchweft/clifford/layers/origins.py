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
    "checkpoint checkpoint_blocks naive_amp compile compile_kwargs activation_memory_budget "
    "additional_qk_mv_channels additional_qk_s_channels"
)
_GATR_SHOWN = "pos_encoding pos_enc_base pos_encodings collapse_dims"
_LGATR_SHOWN = (
    "norm_elementwise_affine sparse_gp sparse_linear subgroup use_fully_connected_subgroup "
    "geometric_product use_geometric_product head_scale num_hidden_layers num_layers_mlp "
    "attn_ratio mlp_ratio increase_hidden_channels q_mv_channels kv_mv_channels q_s_channels "
    "kv_s_channels in_q_mv_channels in_kv_mv_channels in_q_s_channels in_kv_s_channels "
    "condition_mv_channels condition_s_channels mv_channels_cond s_channels_cond "
    "in_v_channels out_v_channels hidden_v_channels v_channels_cond"
)
_CEGNN_SHOWN = (
    "in_features hidden_features out_features edge_attr_features node_attr_features channels "
    "features exclude_dual include_first_order normalization_init n_layers subspaces"
)
_CONVOLUTION_SHOWN = "in_channels out_channels kernel_size stride padding dilation bias g"
_KEPT = {
    "num_heads": ("heads", 8),
    "activation": ("activation", "gelu"),
    "reinsert_mv_channels": ("features", None),
    "reinsert_s_channels": ("scalars", None),
}

GATR = Origin(
    "GATr",
    "the activation, the number of heads and what enters attention",
    {"normalizer_eps": 1e-3, "increase_hidden_channels": 2},
    _KEPT,
    frozenset([*_SHOWN.split(), *_GATR_SHOWN.split()]),
)
LGATR = Origin(
    "L-GATr",
    "the activation, the number of heads and what enters attention",
    {"additional_q_mv_channels": 0, "additional_q_s_channels": 0}
    | {"additional_k_mv_channels": 0, "additional_k_s_channels": 0},
    {
        **_KEPT,
        "crossattention num_heads": ("cross_heads", 8),
        "nonlinearity": ("activation", "gelu"),
        "nonlinearity_v": ("vector_activation", "sigmoid"),
        "bivector": ("bivectors", True),
        "use_bivector": ("bivectors", True),
    },
    frozenset([*_SHOWN.split(), *_LGATR_SHOWN.split()]),
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

_SECTIONS = ("attention", "crossattention", "mlp", "primitives")
"""Parts of a configuration that are configurations."""

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
        for name in ("nonlinearity", "scalar_nonlinearity", "nonlinearity_v"):
            function = getattr(part, name, None)  # of torch, or a partial of it
            if kind in ("ScalarGatedNonlinearity", "SlimGLU") and function is not None:
                option = name if name == "nonlinearity_v" else "activation"
                found.append({option: getattr(function, "func", function).__name__})
        if kind in ("SlimSelfAttention", "SlimCrossAttention"):
            found.append({"num_heads": part.num_heads})
        for name in ("config", "primitives"):
            config = getattr(part, name, None)
            if dataclasses.is_dataclass(config) and not isinstance(config, type):
                found.append({_section(type(config).__name__): dataclasses.asdict(config)})
        for name in ("reinsert_mv_channels", "reinsert_s_channels"):
            if getattr(part, f"_{name}", None) is not None:
                found.append({name: getattr(part, f"_{name}")})
    if origin is LGATR:  # version 1 keeps some of them for the whole process
        loaded = sys.modules.get("lgatr.primitives.config")
        config = getattr(loaded, "gatr_config", None)
        found += [] if config is None else [dataclasses.asdict(config)]
    return found


def _section(config: str) -> str:
    """The name of a configuration's part, by its class."""
    for part in ("MLP", "CrossAttention", "Primitives"):
        if config.startswith(part):
            return part.lower()
    return "attention"


def checked(given: Sequence[Mapping[str, Any]], origin: Origin) -> dict[str, Any]:
    """The options with a counterpart, under its name.

    Raises:
        ShapeError: another option has no counterpart, or is not known.
    """
    found: dict[str, Any] = dict(origin.kept.values())
    for path, value in (pair for part in given for pair in _flat(part)):
        option = path.split(" ")[-1]
        kept = origin.kept.get(path, origin.kept.get(option))
        if kept is not None:
            found[kept[0]] = value
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
        if isinstance(value, Mapping) and name in _SECTIONS:
            yield from _flat(value, path)
        else:
            yield path, value
