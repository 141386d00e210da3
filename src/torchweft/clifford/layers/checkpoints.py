"""State dictionaries of other projects, renamed and permuted for torchweft's modules.

Blades and their signs are the same everywhere, so a converter only moves axes, rescales by a known
number and renames.  flash-clifford's layer needs none: `CliffordLayer` loads it as it is.

    layer.load_state_dict(from_cegnn(original, algebra))

What a network computes depends on options that its state dict does not show.  So a converter takes
the original module, or a state dict and the original's `configuration`: it raises where an option
has no counterpart here, and the state it returns raises in a module that was built with other ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.clifford.algebra import PGA, Algebra
from torchweft.clifford.layers.origins import (
    CEGNN,
    CLIFFORDLAYERS,
    GATR,
    LGATR,
    Origin,
    checked,
    configuration_of,
)
from torchweft.errors import ShapeError

__all__ = ["from_cegnn", "from_cliffordlayers", "from_gatr", "from_lgatr"]

State = dict[str, Tensor]
Source = nn.Module | Mapping[str, Tensor]
Configuration = Mapping[str, Any] | None


def from_cegnn(source: Source, algebra: Algebra, *, configuration: Configuration = None) -> State:
    """CEGNN's modules: MVLinear, products, MVSiLU, norms, CEMLP and EGCL made of them.

    Args:
        source: the module, or its state dict.
        algebra: of the multivectors.
        configuration: arguments of the original's MVSiLU and EGCL, with a state dict that has
            gates; {} for the defaults.

    MVLinear (out, in, n+1) and fully connected products (out, in, P) become (·, in, out); a
    weighted product (F, P) is the same.  Linear maps without a weight for each grade get n+1 equal
    ones.  Gates and norms by grade (…, F, n+1) become (n+1, F).
    """
    state, given = _read(source, configuration, _of_a_gate, CEGNN)
    checked(given, CEGNN)
    return {
        name: _cegnn_tensor(name, tensor, state, algebra)
        for name, tensor in state.items()
        if "algebra" not in name.split(".")  # their tables, saved with every module
    }


def from_gatr(
    source: Source, algebra: Algebra = PGA, *, configuration: Configuration = None
) -> State:
    """GATr's EquiLinear (out, in, 9), and layers, blocks and networks that contain it.

    Args:
        source: the module, or its state dict.
        algebra: of the multivectors.
        configuration: the original's "attention" and "mlp", with the state dict of a network.

    Their nine maps are divided by their Euclidean size as matrices; ours are not.
    """
    state, given = _read(source, configuration, _of_a_network, GATR)
    sizes = torch.tensor(
        [math.comb(algebra.n, g) for g in range(algebra.n + 1)]
        + [math.comb(algebra.n - 1, g) for g in range(algebra.n)]
    ).sqrt()
    options = checked(given, GATR)
    return _with_options(_transformer(state, 1 / sizes), options)


def from_lgatr(source: Source, *, configuration: Configuration = None) -> State:
    """L-GATr's EquiLinear (out, in, 5), or (out, in, 10) with pseudoscalar=True, and networks.

    Args:
        source: the module, or its state dict, of L-GATr 1 or 2.
        configuration: the original's "attention", "mlp" and "primitives", with the state dict of a
            network.

    L-GATr 2 has gains behind its norms, and no biases before the attention: the gains go into the
    linear maps that follow, the biases are zero.
    """
    state, given = _read(source, configuration, _of_a_network, LGATR)
    options = checked(given, LGATR)
    if _is_second(state):
        state = _first_from_second(state)
        if options.get("activation") == "gelu":
            options["activation"] = "gelu_tanh"
    converted = _transformer(state, None)
    renamed = {name.replace("mlp.bilinear.", "mlp."): t for name, t in converted.items()}
    return _with_options(renamed, options)


def from_cliffordlayers(source: Source, *, configuration: Configuration = None) -> State:
    """Cliffordlayers' convolutions: weight.0 … weight.B−1 are stacked; the bias is the same.

    Args:
        source: the module, or its state dict.
        configuration: arguments of the original's convolutions, with a state dict; {} for the
            defaults.
    """
    state, given = _read(source, configuration, lambda name: True, CLIFFORDLAYERS)
    checked(given, CLIFFORDLAYERS)
    out: State = {}
    blades: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in state.items():
        stem, _, index = name.rpartition(".")
        if index.isdigit() and stem.split(".")[-1] == "weight":
            blades.setdefault(stem, []).append((int(index), tensor))
        elif index != "g":  # the metric
            out[name] = tensor
    for stem, parts in blades.items():
        out[stem] = torch.stack([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    return out


def _read(
    source: Source, configuration: Configuration, hides: Callable[[str], bool], origin: Origin
) -> tuple[Mapping[str, Tensor], list[Mapping[str, Any]]]:
    """The state dict, and the options of the module or those given."""
    if isinstance(source, nn.Module):
        return source.state_dict(), configuration_of(source, origin)
    if configuration is None and any(map(hides, source)):
        raise ShapeError(
            f"a state dict of {origin.name} was given without its configuration: it does not show "
            f"{origin.hidden}. Pass the module itself, or configuration={{…}} with the arguments "
            "that it was built with ({} if it has the defaults)."
        )
    return source, [configuration or {}]


def _of_a_gate(name: str) -> bool:
    """Whether a parameter is an MVSiLU's."""
    return name.rpartition(".")[2] == "b"


def _of_a_network(name: str) -> bool:
    """Whether a parameter belongs to attention or to an MLP."""
    return "attention." in name or "mlp." in name or "qkv_module." in name


def _with_options(state: State, options: Mapping[str, Any]) -> State:
    """The state with options of the original, which modules compare with their own."""
    found: OrderedDict[str, Tensor] = OrderedDict(state)
    metadata: dict[str, dict[str, Any]] = {}
    for name in state:
        for owner, option in (("attention.", "heads"), ("mlp.", "activation")):
            before, owned, _ = name.rpartition(f".{owner}")
            if owned and option in options:
                place = f"{before}.{owner}" + ("gate" if option == "activation" else "")
                metadata[place.rstrip(".")] = {option: options[option]}
    found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _is_second(state: Mapping[str, Tensor]) -> bool:
    """Whether a network is L-GATr 2's: its maps before the attention have no biases."""
    linear = [name for name in state if "qkv_module." in name]
    return bool(linear) and not any(name.endswith(".bias") for name in linear)


def _first_from_second(state: Mapping[str, Tensor]) -> State:
    """L-GATr 2's network in terms of 1: gains in the maps that read normalised features."""
    out = {name: t for name, t in state.items() if ".norm1." not in name and ".norm2." not in name}
    for name, tensor in state.items():
        if "qkv_module." in name and name.endswith((".s2mvs.weight", ".mvs2s.weight")):
            out[name.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
    for name in list(out):
        for norm, reader in (
            ("norm1", ".attention.qkv_module."),
            ("norm2", ".mlp.layers.0.linear_"),
        ):
            block, read, rest = name.partition(reader)
            gains = state.get(f"{block}.{norm}.weight_mv"), state.get(f"{block}.{norm}.weight_s")
            if read and gains[0] is not None and gains[1] is not None:
                only_scalars = rest.startswith("out.")  # its multivectors are a product
                out[name] = _after_gains(rest, out[name], gains[0], gains[1], only_scalars)
    return out


def _after_gains(
    name: str, tensor: Tensor, of_grades: Tensor, of_scalars: Tensor, only_scalars: bool
) -> Tensor:
    """The weight of a map behind gains (F, 5) of grades and (S,) of scalars."""
    if name.endswith((".s2mvs.weight", ".s2s.weight")):
        return tensor * of_scalars
    if only_scalars or name.endswith(".bias"):
        return tensor
    if name.endswith("mvs2s.weight"):  # the scalar, or it and the pseudoscalar, of each feature
        ends = tensor.shape[1] // len(of_grades)
        return tensor * of_grades[:, [0, 4][:ends]].flatten()
    return tensor * of_grades.repeat(1, tensor.shape[2] // 5)  # (out, in, maps), by source grade


def _cegnn_tensor(
    name: str, tensor: Tensor, state: Mapping[str, Tensor], algebra: Algebra
) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    if leaf == "bias":  # (1, out, 1)
        return tensor.flatten()
    if leaf in ("a", "b"):  # (1, F, n+1) of a gate, (F, n+1) of `normalization`, (1, F) of a norm
        of_norm = tensor.dim() == 2 and not owner.endswith("normalization")
        return tensor.flatten() if of_norm else tensor.reshape(-1, algebra.n + 1).T.contiguous()
    is_product = f"{prefix}linear_right.weight" in state
    if leaf == "weight" and tensor.dim() == 3:
        return tensor.permute(2, 1, 0).contiguous()
    if leaf == "weight" and not is_product:  # (out, in), the same for all grades
        return tensor.T.expand(algebra.n + 1, -1, -1).contiguous()
    return tensor


def _transformer(state: Mapping[str, Tensor], scale: Tensor | None) -> State:
    out: State = {}
    for name, tensor in state.items():
        owner, _, leaf = name.rpartition(".")
        prefix = f"{owner}." if owner else ""
        if leaf == "weight" and tensor.dim() == 3:
            maps = tensor.permute(2, 1, 0)
            if scale is not None and len(maps) != len(scale):
                raise ShapeError(
                    f"{name} is {tuple(tensor.shape)}: GATr's EquiLinear has {len(scale)} maps. "
                    "Pass the algebra of the checkpoint, or use from_lgatr for L-GATr."
                )
            if scale is not None:
                maps = maps * scale.to(maps).view(-1, 1, 1)
            mixed = any(f"{prefix}{other}.weight" in state for other in ("s2mvs", "mvs2s"))
            name, tensor = f"{prefix}mvs2mvs.weight" if mixed else name, maps.contiguous()
        elif leaf == "bias" and tensor.dim() == 2:
            tensor = tensor.flatten()
        elif leaf == "log_weights":
            tensor = tensor.squeeze(1)
        out.update(_split_heads(_transformer_name(name), tensor))
    return out


def _transformer_name(name: str) -> str:
    for theirs, ours in (
        ("attention.log_weights", "log_weights"),
        ("qkv_module.", ""),
        ("mlp.layers.0.", "mlp.bilinear."),
        ("mlp.layers.2.", "mlp.linear."),
    ):
        name = name.replace(theirs, ours)
    return name


def _split_heads(name: str, tensor: Tensor) -> State:
    """One linear map for queries, keys and values becomes three."""
    before, joint, after = name.rpartition("in_linear.")
    if not joint:
        return {name: tensor}
    out_dim = -1 if after == "mvs2mvs.weight" else 0
    parts = tensor.chunk(3, out_dim)
    return {
        f"{before}{part}_linear.{after}": t.contiguous()
        for part, t in zip("qkv", parts, strict=True)
    }
