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
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.clifford.algebra import PGA, Algebra
from torchweft.clifford.calls import check_algebra
from torchweft.clifford.layers.origins import (
    CEGNN,
    CLIFFORDLAYERS,
    GATR,
    LGATR,
    Origin,
    checked,
    configuration_of,
)
from torchweft.errors import DTypeError, ShapeError

__all__ = ["from_cegnn", "from_cliffordlayers", "from_gatr", "from_lgatr"]

State = dict[str, Tensor]
Source = nn.Module | Mapping[str, Tensor]
Configuration = Mapping[str, Any] | None


def from_cegnn(source: Source, algebra: Algebra, *, configuration: Configuration = None) -> State:
    """Converts the state of a CEGNN module for torchweft's module of the same name.

    MVLinear, products, MVSiLU, norms, CEMLP, EGCL and the published networks.

    Args:
        source: the original module, or its state dict.
        algebra: the algebra of the multivectors.
        configuration: arguments of the original's MVSiLU and EGCL, needed with a state dict that
            has gates; {} for the defaults.

    Returns:
        A state dict, which `load_state_dict` of torchweft's module loads strictly.  MVLinear (out,
        in, n+1) and fully connected products (out, in, P) become (·, in, out); a weighted product
        (F, P) is the same.  Linear maps without a weight for each grade get n+1 equal ones.  Gates
        and norms by grade (…, F, n+1) become (n+1, F).  Modules of torch's own, which have no table
        of an algebra in the state dict, stay as they are.

    Raises:
        DTypeError: nothing of the project was given.
        ShapeError: an option without a counterpart, or a state dict with gates without its
            configuration.

    Source: https://github.com/DavidRuhe/clifford-group-equivariant-neural-networks.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> algebra = clifford.Algebra((1, 1, 1))
        >>> state = {"weight": torch.randn(32, 16, 4), "bias": torch.zeros(1, 32, 1)}  # of MVLinear
        >>> layer = clifford.MultivectorLinear(16, 32, algebra)
        >>> layer.load_state_dict(clifford.from_cegnn(state, algebra))
        <All keys matched successfully>
    """
    check_algebra(algebra)
    state, given = _read(source, configuration, _of_a_gate, CEGNN)
    checked(given, CEGNN)
    converted = {
        name: _cegnn_tensor(name, tensor, state, algebra)
        for name, tensor in state.items()
        if "algebra" not in name.split(".")  # their tables, saved with every module
    }
    _check_converted(converted, state, CEGNN)
    return converted


def from_gatr(
    source: Source, algebra: Algebra = PGA, *, configuration: Configuration = None
) -> State:
    """Converts the state of a GATr module: EquiLinear, attention, or a block or network with it.

    Args:
        source: the original module, or its state dict.
        algebra: the algebra of the multivectors.
        configuration: the original's "attention" and "mlp", needed with the state dict of a
            network.

    Returns:
        A state dict, which `load_state_dict` of torchweft's module loads strictly.  EquiLinear's
        (out, in, 9) becomes (9, in, out): GATr divides its nine maps by their Frobenius norms,
        these factors go into the weights.

    Raises:
        DTypeError: nothing of the project was given.
        ShapeError: an option without a counterpart, another number of maps, or the state dict of a
            network without its configuration.

    Source: https://github.com/Qualcomm-AI-research/geometric-algebra-transformer.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> state = {"weight": torch.randn(16, 8, 9), "bias": torch.zeros(16, 1)}  # of EquiLinear
        >>> clifford.EquiLinear(8, 16).load_state_dict(clifford.from_gatr(state))
        <All keys matched successfully>
    """
    check_algebra(algebra)
    state, given = _read(source, configuration, _of_a_network, GATR)
    sizes = torch.tensor(
        [math.comb(algebra.n, g) for g in range(algebra.n + 1)]
        + [math.comb(algebra.n - 1, g) for g in range(algebra.n)],
        dtype=torch.float64,
    ).sqrt()
    options = checked(given, GATR)
    converted = _transformer(state, 1 / sizes)
    renamed = {name.replace("mlp.linears.0.", "mlp.linear."): t for name, t in converted.items()}
    _check_converted(renamed, state, GATR)
    return _with_options(renamed, options)


def from_lgatr(source: Source, *, configuration: Configuration = None) -> State:
    """Converts the state of an L-GATr module: EquiLinear, attention, or a block or network with it.

    Of versions 1 and 2; slim and conditional networks of version 2 alone.  A cross attention of
    version 1 is `CrossAttention` with `norm_heads=False`.

    Args:
        source: the original module, or its state dict.
        configuration: the original's "attention", "crossattention", "mlp" and "primitives", needed
            with the state dict of a network; for a slim one, its arguments.

    Returns:
        A state dict, which `load_state_dict` of torchweft's module loads strictly.  EquiLinear
        (out, in, 5), or (out, in, 10) with pseudoscalar=True, becomes (5 or 10, in, out); gains (F,
        5) become (5, F).  The networks of version 2 are `LGATr(…, activation="gelu_tanh",
        options=LGATR_2)`, `ConditionalLGATr`, `LGATrSlim` and `ConditionalLGATrSlim`; options of
        the original that its state dict shows must be those of `LGATrOptions`, else shapes and
        names differ.

    Raises:
        DTypeError: nothing of the project was given.
        ShapeError: an option without a counterpart, or the state dict of a network without its
            configuration.

    Source: https://github.com/heidelberg-hepml/lgatr.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> state = {"weight": torch.randn(16, 8, 10), "bias": torch.zeros(16, 1)}  # of EquiLinear
        >>> layer = clifford.EquiLinear(8, 16, clifford.SPACETIME, pseudoscalar=True)
        >>> layer.load_state_dict(clifford.from_lgatr(state))
        <All keys matched successfully>
    """
    state, given = _read(source, configuration, _of_a_network, LGATR)
    options = checked(given, LGATR)
    if _is_slim(state):
        if any(name.endswith("attention.metric") for name in state):
            raise ShapeError(
                "the state is of a slim network of L-GATr 1: torchweft has those of version 2, "
                "whose blocks differ. Keep the original, or train one of version 2."
            )
        return _with_options(_slim(state), options, "gelu_tanh")
    converted = _transformer(state, None)
    renamed = {name.replace("mlp.bilinear.", "mlp."): t for name, t in converted.items()}
    _check_converted(renamed, state, LGATR)
    gelu = "gelu_tanh" if _is_second(state) else "gelu"
    return _with_options(renamed, options, gelu, _cross_attentions(state))


def from_cliffordlayers(source: Source, *, configuration: Configuration = None) -> State:
    """Converts the state of a convolution of cliffordlayers: weight.0 … weight.B−1 are stacked.

    Args:
        source: the original module, or its state dict.
        configuration: arguments of the original's convolutions, needed with a state dict; {} for
            the defaults.

    Returns:
        A state dict, which `load_state_dict` of torchweft's module loads strictly; the bias is the
        same.

    Raises:
        DTypeError: nothing of the project was given.
        ShapeError: an option without a counterpart, or a state dict without its configuration.

    Source: https://github.com/microsoft/cliffordlayers.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> state = {f"weight.{i}": torch.randn(3, 2, 3, 3) for i in range(4)}
        >>> state["bias"] = torch.zeros(4, 3)
        >>> layer = clifford.CliffordConv2d(clifford.Algebra((1, 1)), 2, 3, kernel_size=3)
        >>> layer.load_state_dict(clifford.from_cliffordlayers(state, configuration={}))
        <All keys matched successfully>
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
    _check_converted(out, state, CLIFFORDLAYERS)
    return out


def _read(
    source: Source, configuration: Configuration, hides: Callable[[str], bool], origin: Origin
) -> tuple[Mapping[str, Tensor], list[Mapping[str, Any]]]:
    """The state dict, and the options of the module or those given."""
    if isinstance(source, nn.Module):
        return source.state_dict(), configuration_of(source, origin)
    if not isinstance(source, Mapping):
        raise DTypeError(
            f"a {type(source).__name__} was given: a loader takes a module of {origin.name}, or "
            "its state dict. Pass the module, or torch.load(path)."
        )
    if configuration is None and any(map(hides, source)):
        raise ShapeError(
            f"a state dict of {origin.name} was given without its configuration: it does not show "
            f"{origin.hidden}. Pass the module itself, or configuration={{…}} with the arguments "
            "that it was built with ({} if it has the defaults)."
        )
    return source, [configuration or {}]


def _check_converted(converted: State, state: Mapping[str, Tensor], origin: Origin) -> None:
    """Raise where tensors were given and all stayed as they are: none is of the project."""
    if state and all(converted.get(name) is tensor for name, tensor in state.items()):
        names = list(state)
        shown = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        raise DTypeError(
            f"a state with {shown} was given: it must hold tensors of a layer of {origin.name}, "
            "of which there is none. Pass the module of the original, or its state dict."
        )


def _of_a_gate(name: str) -> bool:
    """Whether a parameter is an MVSiLU's."""
    return name.rpartition(".")[2] == "b"


def _of_a_network(name: str) -> bool:
    """Whether a parameter belongs to attention or to an MLP."""
    return any(part in name for part in ("attention.", "mlp.", "qkv_module.", "q_linear."))


def _with_options(
    state: State,
    options: Mapping[str, Any],
    gelu: str = "gelu",
    crossing: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> State:
    """The state with options of the original, which modules compare with their own.

    Args:
        state: of our modules.
        options: see `checked`.
        gelu: our name of the activation that the original calls so.
        crossing: see `_cross_attentions`.
    """
    found: OrderedDict[str, Tensor] = OrderedDict(state)
    metadata: dict[str, dict[str, Any]] = {}
    activation, of_vectors = (
        gelu if name == "gelu" else name
        for name in (options["activation"], options.get("vector_activation"))
    )
    inserted = {name: tuple(options[name] or ()) for name in ("features", "scalars")}
    for name in state:
        parts = name.split(".")
        for i, part in enumerate(parts):
            owner = ".".join(parts[:i])
            if part in ("q_linear", "linear_in_q"):
                heads = options["cross_heads" if owner in crossing else "heads"]
                metadata[owner] = {"heads": heads, **crossing.get(owner, {})}
            elif part == "gated":
                pair = (activation, of_vectors or activation)
                metadata[".".join(parts[: i + 2])] = {"activations": pair}
            elif part == "mlp":
                place = f"{owner}.mlp".lstrip(".")
                metadata[place] = {k: options[k] for k in ("bivectors",) if k in options}
                if parts[i + 1] in ("linear", "linears"):  # which follow the gate
                    metadata[f"{place}.gate"] = {"activation": activation}
            elif part == "blocks":
                metadata[f"{owner}.reinsert".lstrip(".")] = inserted
    found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _cross_attentions(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """L-GATr's attentions over other items by name, and options: those of version 1 norm nothing.

    They have one map for keys and values; in version 1 with a bias.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in state:
        before, joint, after = _transformer_name(name).partition("kv_linear.")
        if joint:
            options = found.setdefault(before.rstrip("."), {})
            if after.endswith("bias"):
                options["norm_heads"] = False
    return found


def _is_second(state: Mapping[str, Tensor]) -> bool:
    """Whether a network is L-GATr 2's: its maps before the attention have no biases."""
    linear = [name for name in state if "qkv_module." in name]
    return bool(linear) and not any(name.endswith(".bias") for name in linear)


def _is_slim(state: Mapping[str, Tensor]) -> bool:
    """Whether a network is one of the slim ones: it maps vectors by one matrix."""
    return any(name.endswith("linear_in.weight_v") for name in state)


def _slim(state: Mapping[str, Tensor]) -> State:
    """Queries, and keys with values, from one map that all three came from."""
    out: State = {}
    for name, tensor in _numbered_by_kind(state).items():
        name = name.replace("selfattention.", "attention.")
        name = name.replace("crossattention.", "cross_attention.")
        name = name.replace("mlp.linears.0.", "mlp.linear.")
        before, joint, after = name.rpartition("attention.linear_in.")
        if joint:
            third = len(tensor) // 3
            start = f"{before}attention.linear_in"
            out[f"{start}_q.{after}"] = tensor[:third].contiguous()
            out[f"{start}_kv.{after}"] = tensor[third:].contiguous()
        else:
            out[name] = tensor
    return out


def _numbered_by_kind(state: Mapping[str, Tensor]) -> State:
    """An MLP's layers numbered without those that have no parameters.

    Its first layer is called bilinear if it is a product, a slim one's gated layers are gated.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    found = []
    for name, tensor in state.items():
        before, layer, after = name.partition("mlp.layers.")
        number, _, rest = after.partition(".")
        kind = "gated" if rest.startswith("linear.") else "linears"
        kind = "bilinear" if rest.startswith("linear_") and "linear_s" not in rest else kind
        if layer and int(number) not in numbers.setdefault((before, kind), []):
            numbers[before, kind].append(int(number))
        found.append((before, layer, kind, number, rest, tensor))
    out: State = {}
    for before, layer, kind, number, rest, tensor in found:
        place = f".{sorted(numbers[before, kind]).index(int(number))}" if layer else ""
        place = "" if kind == "bilinear" else place
        out[f"{before}mlp.{kind}{place}.{rest}" if layer else before] = tensor
    return out


def _cegnn_tensor(
    name: str, tensor: Tensor, state: Mapping[str, Tensor], algebra: Algebra
) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    if _is_of_torch(prefix, state):
        return tensor
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


_MAPS = [f"{name}_linear" for name in ("in", "q", "k", "v", "kv", "out")] + [
    f"linear_{name}" for name in ("in", "out", "left", "right", "join_left", "join_right")
]
"""Linear maps of a network, which are a `MixedLinear` also where there are no scalars."""


def _is_of_torch(prefix: str, state: Mapping[str, Tensor]) -> bool:
    """Whether a module is none of CEGNN's: those save the tables of their algebra."""
    bias = state.get(f"{prefix}bias")
    if bias is not None and bias.dim() == 1:
        return True
    has_tables = any(name.endswith("algebra.cayley") for name in state)
    return has_tables and f"{prefix}algebra.cayley" not in state


def _transformer(state: Mapping[str, Tensor], scale: Tensor | None) -> State:
    out: State = {}
    for name, tensor in _numbered_by_kind(state).items():
        owner, _, leaf = name.rpartition(".")
        prefix = f"{owner}." if owner else ""
        if leaf == "weight" and tensor.dim() == 3:
            tensor = _maps(name, tensor, scale)
        elif leaf == "bias" and tensor.dim() == 2:
            tensor = tensor.flatten()
        elif leaf == "log_weights":
            tensor = tensor.squeeze(1)
        elif leaf == "weight_mv":
            name, tensor = f"{prefix}weight", tensor.T.contiguous()
        elif leaf == "weight_s":
            name = f"{prefix}scalar_weight"
        mixed = any(f"{prefix}{other}.weight" in state for other in ("s2mvs", "mvs2s"))
        kinds = owner.split(".")
        mixed |= kinds[-1] in _MAPS or kinds[-2:-1] == ["linears"]
        if mixed and leaf in ("weight", "bias"):
            name = f"{prefix}mvs2mvs.{leaf}"
        out.update(_split_heads(_transformer_name(name), tensor))
    return out


def _maps(name: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
    """(out, in, maps) as (maps, in, out), rescaled."""
    maps = tensor.permute(2, 1, 0)
    if scale is not None and len(maps) != len(scale):
        raise ShapeError(
            f"{name} is {tuple(tensor.shape)}: GATr's EquiLinear has {len(scale)} maps. "
            "Pass the algebra of the checkpoint, or use from_lgatr for L-GATr."
        )
    if scale is not None:
        maps = maps * scale.to(maps).view(-1, 1, 1)
    return maps.contiguous()


def _transformer_name(name: str) -> str:
    for theirs, ours in (
        ("attention.log_weights", "log_weights"),
        ("pos_encoding.inv_freq", "rotary.frequencies"),
        ("qkv_module.", ""),
        ("crossattention.", "cross_attention."),
        ("norm_cond.", "norm_other."),
    ):
        name = name.replace(theirs, ours)
    return name


def _split_heads(name: str, tensor: Tensor) -> State:
    """One linear map for queries, keys and values, or for the last two, becomes several."""
    for joined, parts in (("in_linear.", "qkv"), ("kv_linear.", "kv")):
        before, joint, after = name.rpartition(joined)
        if joint:
            tensors = tensor.chunk(len(parts), -1 if after == "mvs2mvs.weight" else 0)
            return {
                f"{before}{part}_linear.{after}": t.contiguous()
                for part, t in zip(parts, tensors, strict=True)
            }
    return {name: tensor}
