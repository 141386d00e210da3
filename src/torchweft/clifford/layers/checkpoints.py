"""State dictionaries of other projects, renamed and permuted for torchweft's modules.

Blades and their signs are the same everywhere, so a converter only moves axes, rescales by a known
number and renames.  flash-clifford's layer needs none: `CliffordLayer` loads it as it is.

    layer.load_state_dict(from_cegnn(torch.load("layer.pt"), algebra))
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchweft.clifford.algebra import PGA, Algebra
from torchweft.errors import ShapeError

__all__ = ["from_cegnn", "from_cliffordlayers", "from_gatr", "from_lgatr"]

State = dict[str, Tensor]


def from_cegnn(state: Mapping[str, Tensor], algebra: Algebra) -> State:
    """CEGNN's modules: MVLinear, products, MVSiLU, norms, CEMLP and EGCL made of them.

    MVLinear (out, in, n+1) and fully connected products (out, in, P) become (·, in, out); a
    weighted product (F, P) is the same.  Linear maps without a weight for each grade get n+1 equal
    ones.  Gates and norms by grade (…, F, n+1) become (n+1, F).
    """
    return {
        name: _cegnn_tensor(name, tensor, state, algebra)
        for name, tensor in state.items()
        if "algebra" not in name.split(".")  # their tables, saved with every module
    }


def from_gatr(state: Mapping[str, Tensor], algebra: Algebra = PGA) -> State:
    """GATr's EquiLinear (out, in, 9), and layers, blocks and networks that contain it.

    Their nine maps are divided by their Euclidean size as matrices; ours are not.
    """
    sizes = torch.tensor(
        [math.comb(algebra.n, g) for g in range(algebra.n + 1)]
        + [math.comb(algebra.n - 1, g) for g in range(algebra.n)]
    ).sqrt()
    return _transformer(state, 1 / sizes)


def from_lgatr(state: Mapping[str, Tensor]) -> State:
    """L-GATr's EquiLinear (out, in, 5), or (out, in, 10) with pseudoscalar=True, and networks."""
    converted = _transformer(state, None)
    return {name.replace("mlp.bilinear.", "mlp."): tensor for name, tensor in converted.items()}


def from_cliffordlayers(state: Mapping[str, Tensor]) -> State:
    """Cliffordlayers' convolutions: weight.0 … weight.B−1 are stacked; the bias is the same."""
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
