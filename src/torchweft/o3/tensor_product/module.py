"""Base classes of modules: layouts, the flat weight and its views, instructions, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from torchweft.core.backend import check_torch_only
from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operands import check_tensors, same_kind
from torchweft.core.operators.tensor_list import CachedCall
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.o3.channelwise.operator import cached_call as kept
from torchweft.o3.channelwise.operator import contraction
from torchweft.o3.channelwise.product import FORWARD
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.graph import Graph
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike, check_layout, check_rows, split_weight
from torchweft.o3.mixing.blocks import Mixing
from torchweft.o3.mixing.operator import mix, serves_mix
from torchweft.o3.tensor_product.evaluation import ProductRecipe
from torchweft.o3.tensor_product.instructions import (
    Instruction,
    Operands,
    WeightedInstruction,
    instructions_of,
    structures_of,
    weight_sizes,
)

__all__ = [
    "ConvolutionOptions",
    "InstructedModule",
    "MixingOptions",
    "ProductOptions",
    "RowLayer",
    "WeightedModule",
]

_NOT_CACHED = (None, None)


class RowLayer(nn.Module):
    """A layer on rows of irreps, which loads the checkpoint of e3nn's layer.

    Args:
        layout: "mul_ir", e3nn's, or "ir_mul".
        backend: of the layer.

    `_e3nn_parts` names the modules without parameters inside e3nn's layer, whose tables are not
    loaded; None: e3nn's layer has no tables.  `_torch_only`: there are no kernels for the layer.
    """

    _e3nn_parts: ClassVar[tuple[str, ...] | None] = None
    _torch_only: ClassVar[bool] = True

    def __init__(self, layout: str = "mul_ir", backend: str | None = None) -> None:
        super().__init__()
        check_layout(layout)
        if self._torch_only:
            check_torch_only(self, backend)
        self.layout, self.backend = layout, backend

    def __prepare_scriptable__(self) -> RowLayer:
        """Called by torch.jit.script, whose own error would not say what to do."""
        raise BackendError(
            f"torch.jit.script was given {self!r}, or a model with it: TorchScript cannot read "
            "torchweft's layers. Use torch.compile, or torch.export and AOTInductor for C++; or "
            "script a model of the original class after load_state_dict(o3.to_e3nn(model))."
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self._e3nn_parts is not None:
            # drop tables of e3nn's code, masks, empty weights, and modules without parameters
            parameters = {f"{prefix}{name}" for name, _ in self.named_parameters(recurse=False)}
            names = ("output_mask", "_compiled_main", *self._e3nn_parts)
            tables = tuple(f"{prefix}{name}" for name in names)
            for key in [k for k in state_dict if k.startswith(prefix) and k not in parameters]:
                weight = key in (f"{prefix}weight", f"{prefix}bias")
                if key.startswith(tables) or (weight and not state_dict[key].numel()):
                    del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


class WeightedModule(RowLayer):
    """A module whose instructions have one flat weight, which it owns or the caller gives.

    Args:
        instructions: in the order of their weights.
        irreps_out: of the output; `output_mask` is 1 where an instruction reaches it, else 0.
        internal_weights: whether the module owns the weight; None: if it is shared.
        shared_weights: whether all rows have the same weight, (weight_numel,), (None) or each its
            own, (…, weight_numel).
        layout: of the rows, "mul_ir" or "ir_mul".
        backend: of the module.
        dims: leading dimensions of the module's own weight, in front of weight_numel.
    """

    _e3nn_parts = ()

    instructions: Sequence[WeightedInstruction]
    irreps_in: Irreps
    weight: Tensor
    output_mask: Tensor

    def __init__(
        self,
        instructions: Sequence[WeightedInstruction],
        irreps_out: Irreps,
        internal_weights: bool | None,
        shared_weights: bool | None,
        layout: str,
        backend: str | None,
        dims: tuple[int, ...] = (),
    ) -> None:
        super().__init__(layout, backend)
        shared_weights = True if shared_weights is None else shared_weights
        if internal_weights and not shared_weights:
            raise ShapeError(
                "internal_weights is True but shared_weights is False: weights of the module are "
                "the same in all rows. Leave one of them out, or pass weights at the call."
            )
        self.instructions = list(instructions)
        self.irreps_out = irreps_out
        self._shapes = [i.path_shape if i.has_weight else None for i in instructions]
        *self.offsets, self.weight_numel = accumulate(weight_sizes(instructions), initial=0)
        self.shared_weights, self.dims = shared_weights, dims
        if internal_weights is None:
            internal_weights = shared_weights and self.weight_numel > 0
        self.internal_weights = internal_weights
        if internal_weights and self.weight_numel > 0:
            self.weight = nn.Parameter(torch.randn(*dims, self.weight_numel))
        else:  # an empty tensor, as e3nn's
            self.register_buffer("weight", torch.empty(0), persistent=False)
        reached = {i.i_out for i in instructions if i.path_weight and 0 not in i.path_shape}
        parts = [torch.full((item.dim,), float(n in reached)) for n, item in enumerate(irreps_out)]
        mask = torch.cat(parts) if parts else torch.ones(0)
        self.register_buffer("output_mask", mask, persistent=False)

    def __repr__(self) -> str:
        irreps = f"{self.irreps_in} -> {self.irreps_out}"
        return f"{type(self).__name__}({irreps} | {self.weight_numel} weights)"

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """(…, *path_shape): the weight of one instruction, a view of the flat weight.

        Args:
            instruction: its number.
            weight: the flat weight; None: the module's.

        Raises:
            ShapeError: the instruction has no weight, or the weights do not fit.
        """
        if not self.instructions[instruction].has_weight:
            raise ShapeError(
                f"instruction {instruction} has no weight: there is nothing to view. Choose one "
                "with has_weight."
            )
        view = self._views(self.checked_weight(weight))[instruction]
        assert view is not None
        return view

    def weight_views(
        self, weight: Tensor | None = None, yield_instruction: bool = False
    ) -> Iterator[Any]:
        """The weights of the instructions that have one; with (number, instruction) in front."""
        views = self._views(self.checked_weight(weight))
        for n, (instruction, view) in enumerate(zip(self.instructions, views, strict=True)):
            if view is not None:
                yield (n, instruction, view) if yield_instruction else view

    def _views(self, weight: Tensor | None) -> list[Tensor | None]:
        """(…, *path_shape): the weight of each instruction; None for one without a weight."""
        return split_weight(weight, self._shapes)

    def checked_weight(self, weight: Tensor | Sequence[Tensor] | None) -> Tensor | None:
        """The flat weight: the given tensor or list of tensors, or the module's.

        Raises:
            WeftError: the weight is missing or has another shape.
        """
        if weight is None:
            if self.weight_numel and not self.weight.numel():
                raise ShapeError(
                    f"weight is missing: {self!r} takes {self._wanted()}. "
                    "Pass it, or build the module with internal_weights=True."
                )
            return self.weight if self.weight_numel else None
        if not isinstance(weight, Tensor):
            weight = self._flattened(weight)
        check_tensors(weight=weight)
        own = (*self.dims, self.weight_numel)
        fits = weight.dim() > 0 and weight.shape[-1] == self.weight_numel
        if not fits or (weight.shape != own if self.shared_weights else weight.dim() < 2):
            raise ShapeError(
                f"weight is {tuple(weight.shape)}: {self!r} with shared_weights="
                f"{self.shared_weights} takes {self._wanted()}. Pass such weights, or change "
                "shared_weights."
            )
        return weight

    def _flattened(self, weights: Sequence[Tensor]) -> Tensor:
        shapes = [s for s in self._shapes if s is not None and 0 not in s]
        if not isinstance(weights, list | tuple) or len(weights) != len(shapes):
            raise DTypeError(
                f"weight is a {type(weights).__name__}: it must be {self._wanted()}, or a list of "
                f"{len(shapes)}, one for each instruction with weights. Pass one of these."
            )
        return torch.cat(
            [w.flatten(w.dim() - len(s)) for w, s in zip(weights, shapes, strict=True)], -1
        )

    def _wanted(self) -> str:
        if self.shared_weights:
            return str((*self.dims, self.weight_numel))
        return f"(…, {self.weight_numel}), one set for each row or edge"


class MixingOptions(TypedDict, total=False):
    """Arguments of TensorProduct that FullyConnectedTensorProduct takes by name."""

    in1_var: Iterable[float] | None
    in2_var: Iterable[float] | None
    out_var: Iterable[float] | None
    internal_weights: bool | None
    shared_weights: bool | None
    normalization: str | None
    compile_left_right: bool
    compile_right: bool
    layout: str
    backend: str | None


class ProductOptions(MixingOptions, total=False):
    """Arguments of TensorProduct that products without given instructions take by name."""

    path_normalization: str | None


class ConvolutionOptions(ProductOptions, total=False):
    """Arguments of TensorProduct that TensorProductConv takes by name."""

    irrep_normalization: str | None


class InstructedModule(WeightedModule):
    """A tensor product of rows or of edges: irreps, instructions, weights.

    Args: those of TensorProduct.

    `shares` is the default of shared_weights; weights that the module owns are always shared.
    """

    shares: ClassVar[bool] = True
    _torch_only = False
    instructions: Sequence[Instruction]

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[Sequence[Any]],
        in1_var: Iterable[float] | None = None,
        in2_var: Iterable[float] | None = None,
        out_var: Iterable[float] | None = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        *,
        normalization: str | None = None,
        compile_left_right: bool = True,
        compile_right: bool = False,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        if normalization is not None:
            irrep_normalization = _one_normalization(irrep_normalization, normalization)
        operands = Operands(Irreps(irreps_in1), Irreps(irreps_in2), Irreps(irreps_out))
        variances = (in1_var, in2_var, out_var)
        normalizations = (irrep_normalization, path_normalization)
        found = instructions_of(instructions, operands, *variances, *normalizations)
        shared = self.shares or bool(internal_weights) if shared_weights is None else shared_weights
        super().__init__(found, operands.out, internal_weights, shared, layout, backend)
        self.irreps_in1, self.irreps_in2 = operands.in1, operands.in2
        self._plan(found)

    def take_signs(self, signs: Sequence[float]) -> None:
        """Multiply the factor of each instruction by 1 or -1, for 3j symbols of another sign."""
        self.instructions = [
            i._replace(path_weight=sign * i.path_weight)
            for i, sign in zip(self.instructions, signs, strict=True)
        ]
        self._plan(tuple(self.instructions))

    def _plan(self, instructions: tuple[Instruction, ...]) -> None:
        operands = Operands(self.irreps_in1, self.irreps_in2, self.irreps_out)
        parts = structures_of(instructions, operands, self.layout)
        how = self.layout, self.shared_weights, self.backend
        self.recipe = ProductRecipe(operands, instructions, parts, *how)
        self._calls: CallCache[tuple[CachedCall, Mixing | None]] = CallCache()

    def _checked(
        self, x: Tensor, y: Tensor, weight: Tensor | Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, y and the flat weight, checked and of one dtype."""
        check_rows("x", x, self.irreps_in1, self)
        check_rows("y", y, self.irreps_in2, self)
        x, y, *flat = same_kind(x=x, y=y, weight=self.checked_weight(weight))
        return x, y, flat[0] if flat else None

    def _evaluated(
        self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None = None
    ) -> Tensor:
        """The product of checked rows, by the cached call if one or two operators compute it."""
        weight = weight if self.weight_numel else None  # an operator has no empty weights
        self._cache(x, y, weight, graph)  # first: a checkpoint's second call is like the first
        z = self._cached(x, y, weight, graph)
        return self.recipe(x, y, weight, graph) if z is None else z

    def _cached(
        self, x: Tensor, y: Tensor, weight: Any, graph: Graph | None = None
    ) -> Tensor | None:
        """The result of a cached call by one or two operators; None: the call is not cached."""
        if weight is None and self.weight_numel:
            weight = self.weight
        given = (x, y) if weight is None else (x, y, weight)
        known = signature(given)
        if known is None:
            return None
        rest, mixing = self._calls.get((known, graph and graph.kind), _NOT_CACHED)
        if rest is None:
            return None
        if mixing is not None:
            given = (x, y)
        elif weight is not None and self.shared_weights:
            given = (x, y, weight.unsqueeze(0))
        z = contraction(given if graph is None else (*given, *graph.packed), rest)[0]
        return z if mixing is None else mix(mixing, z, weight)

    def _cache(self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None) -> None:
        """Cache a call that was checked, if one or two operators compute it."""
        known = signature((x, y) if weight is None else (x, y, weight))
        if known is None or (graph is not None and graph.kind is None):
            return
        alike = x.dim() == 2 and x.shape[:1] == y.shape[:-1] and not self.recipe.by_torch(x)
        structure, mixing = self._operators(x)
        if structure is None or not (graph is not None or alike):
            return
        rows = x.shape[0]
        sizes = (rows, rows, rows) if graph is None else graph.tables[:3]
        present = "" if graph is None else graph.present
        weighted = weight is not None and mixing is None
        text, call = structure.text, FORWARD[weighted]
        rest = kept(text, call, present, sizes, weighted and self.shared_weights, self.backend)
        self._calls.keep((known, graph and graph.kind), (rest, mixing))

    def _operators(self, x: Tensor) -> tuple[Structure | None, Mixing | None]:
        """The structures of the one operator for rows like x, or of the two of shared weights."""
        direct, mixed, dense, *_ = self.recipe.parts
        if mixed is None and len(direct) == 1 and not dense:
            return direct[0], None
        if mixed is None or direct or dense or not self.shared_weights or not self.weight_numel:
            return None, None
        found = serves_mix(mixed.mixing, x, True, self.backend)
        return (mixed.structure, mixed.mixing) if found else (None, None)

    def __repr__(self) -> str:
        paths = sum(math.prod(instruction.path_shape) for instruction in self.instructions)
        return (
            f"{type(self).__name__}({self.irreps_in1.simplify()} x {self.irreps_in2.simplify()} "
            f"-> {self.irreps_out.simplify()} | {paths} paths | {self.weight_numel} weights)"
        )


def _one_normalization(irrep_normalization: str | None, normalization: str) -> str:
    """The value of two names of one argument."""
    if irrep_normalization not in (None, normalization):
        raise ShapeError(
            f"irrep_normalization is {irrep_normalization!r} and normalization {normalization!r}: "
            "they are two names of one argument. Pass only one."
        )
    return normalization
