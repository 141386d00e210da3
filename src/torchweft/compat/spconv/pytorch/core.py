"""SparseConvTensor: features on voxels with spconv's attributes, over voxels.SparseTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft import voxels
from torchweft.compat.lacking import lacking
from torchweft.compat.spconv.core import ConvAlgo
from torchweft.compat.voxels import register_tree, rows_of, same_rows, voxels_of
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap, Maps

__all__ = [
    "ImplicitGemmIndiceData",
    "IndiceData",
    "SparseConvTensor",
    "check_same_voxels",
    "expand_nd",
    "written",
]


class IndiceData:
    """What a layer leaves in `indice_dict` under its key: its geometry and its pairs.

    Attributes: indices and out_indices (N, 1 + d), spatial_shape, out_spatial_shape, is_subm,
    ksize, stride, padding, dilation, algo; `pairs` is torchweft's map.  spconv's tables are
    computed when they are read.
    """

    def __init__(self, layer: Any, inputs: SparseConvTensor, pairs: KernelMap) -> None:
        self.pairs, self.indices, self.out_indices = pairs, inputs.indices, inputs.indices
        self.spatial_shape, self.out_spatial_shape = inputs.spatial_shape, inputs.spatial_shape
        self.is_subm, self.algo = pairs.inputs is pairs.outputs, layer.algo
        self.ksize, self.stride = layer.kernel_size, layer.stride
        self.padding, self.dilation = layer.padding, layer.dilation

    @property
    def pair_fwd(self) -> Tensor:
        """(K, N_out) int32, the input row of each output row, −1 for none."""
        return self.pairs.sources

    @property
    def pair_bwd(self) -> Tensor:
        """(K, N_in) int32, the output row of each input row, −1 for none."""
        return self.pairs.targets

    @property
    def indice_pair_num(self) -> Tensor:
        """(K,) int32: pairs of each offset."""
        return self.pairs.counts.int()

    @property
    def indice_pairs(self) -> Tensor:
        """(2, K, N_in) int32, the input and the output rows that meet at an offset, then −1."""
        offsets, count = self.pairs.geometry.num_offsets, len(self.pairs.inputs)
        found = self.indices.new_full((2, offsets, count), -1)
        for k in range(offsets):
            for side, rows in zip(found[:, k], self.pairs.pairs(k), strict=True):
                side[: len(rows)] = rows
        return found


ImplicitGemmIndiceData = IndiceData


class SparseConvTensor:
    """features[n] is the row of the voxel indices[n] = (batch, s0, s1, …).

    Args:
        features: (N, C).  They cannot be assigned, as in spconv 2; see `replace_feature`.
        indices: (N, 1 + d) int32, d = 1 to 4.  They may be assigned, and written to.
        spatial_shape: d lengths.
        batch_size: number of samples, including empty ones.
        grid: kept for programs that read it; nothing here needs it.
        voxel_num: as grid.
        indice_dict: what layers left under their `indice_key`; shared, not copied.
        benchmark: must be False.
        permanent_thrust_allocator: has no effect.
        enable_timer: must be False.
        force_algo: has no effect.

    Raises:
        ShapeError, DTypeError: tensors that cannot be features and indices of such a box; rows
            that do not fit, voxels outside and duplicates are found by the first layer.
        NotImplementedError: benchmark or enable_timer.
    """

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[str, IndiceData] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        _check(features, indices, spatial_shape, batch_size)
        if benchmark or enable_timer:
            raise NotImplementedError(
                f"benchmark={benchmark} and enable_timer={enable_timer} were given: torchweft's "
                "stand-in records no times. Leave both out, and use torch.profiler."
            )
        self._features, self.indices = features, indices
        self.spatial_shape = [int(n) for n in spatial_shape]
        self.batch_size = batch_size
        self.indice_dict = {} if indice_dict is None else indice_dict
        self.grid, self.voxel_num, self.force_algo = grid, voxel_num, force_algo
        self.benchmark, self.benchmark_record = benchmark, dict[str, Any]()
        self.kept: Coordinates | None = None  # the voxels of indices, with their maps

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"

    @property
    def features(self) -> Tensor:
        """(N, C); `replace_feature` makes a tensor with others."""
        return self._features

    @features.setter
    def features(self, features: Tensor) -> None:
        raise ShapeError(
            f"x.features was assigned {tuple(features.shape)}: the features of a SparseConvTensor "
            "stay, as in spconv 2. Write x = x.replace_feature(features)."
        )

    @property
    def is_quantized(self) -> bool:
        """False: nothing here is quantized."""
        return False

    @property
    def spatial_size(self) -> int:
        """The number of voxels in the box."""
        return math.prod(self.spatial_shape)

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """The voxels of (batch, *spatial_shape, C) where some channel is not 0."""
        found = voxels.SparseTensor.from_dense(x.movedim(-1, 1))
        indices = rows_of(found.coordinates)
        return cls(found.feats, indices, found.spatial_shape, found.batch_size)

    @classmethod
    def from_sparse(cls, tensor: voxels.SparseTensor) -> SparseConvTensor:
        """Of torchweft's tensor, with its features and the maps of its voxels."""
        found = tensor.coordinates
        shape, size = tensor.spatial_shape, tensor.batch_size
        made = cls(tensor.feats, rows_of(found), shape, size)
        made.kept = found
        return made

    def sparse(self) -> voxels.SparseTensor:
        """torchweft's tensor with these features and voxels; it shares the maps of the voxels.

        Raises:
            ShapeError: features and indices have different numbers of rows.
            IndexRangeError: a voxel outside of the box.
        """
        self.kept = voxels_of(self.indices, self.batch_size, self.spatial_shape)
        return voxels.SparseTensor.on(self._features, self.kept, Maps())

    __voxels__ = sparse

    def dense(self, channels_first: bool = True) -> Tensor:
        """(batch, C, *spatial_shape), or the channels last; contiguous."""
        found = self.sparse().dense()
        return found if channels_first else found.movedim(1, -1).contiguous()

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """Other features (N, C′) on the same voxels, with the same indice_dict."""
        found = self.shadow_copy()
        found._features = feature
        return found

    def shadow_copy(self) -> SparseConvTensor:
        """Another object with the same members."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """The rows of a mask or of an index, with an indice_dict of its own."""
        found = self.replace_feature(self.features[valid_indices])
        found.indices, found.indice_dict = self.indices[valid_indices], {}
        return found

    def minus(self) -> SparseConvTensor:
        """−x on the same voxels."""
        return self.replace_feature(-self.features)

    def find_indice_pair(self, key: str | None) -> IndiceData | None:
        """What the layer with this indice_key left; None if there is none."""
        return None if key is None else self.indice_dict.get(key)

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        """Sums of features, row by row; tensors with other voxels are refused."""
        if isinstance(other, SparseConvTensor):
            check_same_voxels(self, other, "+")
            other = other.features
        return self.replace_feature(self.features + other)

    __radd__ = __add__

    def q_scale(self) -> float:
        """Not there: nothing here is quantized."""
        raise NotImplementedError(
            "q_scale of an int8 tensor was asked for: torchweft's stand-in computes in float64, "
            "float32, bfloat16 and float16. Pass features.half(), and a module in half."
        )


def written(
    layer: Any, inputs: SparseConvTensor, found: voxels.SparseTensor, pairs: KernelMap
) -> SparseConvTensor:
    """The output of a layer that keeps or makes voxels; leaves its pairs under its key."""
    outputs = inputs.replace_feature(found.feats)
    outputs.indice_dict = inputs.indice_dict.copy()
    data = IndiceData(layer, inputs, pairs)
    if not data.is_subm:
        outputs.indices = data.out_indices = rows_of(found.coordinates)
        outputs.kept = found.coordinates
        outputs.spatial_shape = data.out_spatial_shape = list(found.spatial_shape)
    if layer.indice_key is not None:
        outputs.indice_dict[layer.indice_key] = data
    return outputs


def check_same_voxels(first: SparseConvTensor, other: SparseConvTensor, name: str) -> None:
    """Raise unless two tensors have the same voxels in the same rows, and the same box."""
    a, b = ((t.batch_size, *t.spatial_shape) for t in (first, other))
    if a != b or not same_rows(first.indices, other.indices):
        raise ShapeError(
            f"{name} was given tensors of {len(first.indices)} and {len(other.indices)} voxels in "
            f"the boxes {a} and {b} (batch first): they must have the same voxels, row by row. Use "
            "spconv.pytorch.functional.sparse_add, or AddTableMisaligned, for different ones."
        )


def expand_nd(ndim: int, val: Any) -> list[int]:
    """One integer per axis, from one or from as many; NumPy's integers too.

    Raises:
        ShapeError: another number of them.
    """
    numbers = [int(n) for n in val] if hasattr(val, "__len__") else [int(val)] * ndim
    if len(numbers) != ndim:
        raise ShapeError(
            f"{val!r} has {len(numbers)} numbers for {ndim} axes: one, or {ndim}, are needed. "
            "Correct the layer's sizes."
        )
    return numbers


def _check(features: Tensor, indices: Tensor, shape: Sequence[int], batch_size: int) -> None:
    dim = indices.shape[1] - 1 if indices.ndim == 2 else None
    if features.ndim != 2 or dim is None or len(shape) != dim:
        raise ShapeError(
            f"features are {tuple(features.shape)}, indices {tuple(indices.shape)} and "
            f"spatial_shape has {len(shape)} lengths: (N, C), (N, 1 + d) and d are needed. Pass "
            "the batch number in the first column of indices."
        )
    if indices.dtype != torch.int32:
        raise DTypeError(
            f"indices are {indices.dtype}: they must be torch.int32, as in spconv. Pass "
            "indices.int()."
        )
    if batch_size < 1:
        raise ShapeError(
            f"batch_size is {batch_size}: it must be at least 1. Pass the number of samples, empty "
            "ones too."
        )


def _check_alone(tensor: SparseConvTensor) -> None:
    if tensor.indice_dict:
        raise ShapeError(
            f"a SparseConvTensor with the pairs of {', '.join(map(repr, tensor.indice_dict))} was "
            "passed to torchweft.capture, or is a result there: a record takes tensors as they "
            "are before a network, and returns features. Return x.features."
        )


def _made(tensor: voxels.SparseTensor, _: None) -> SparseConvTensor:
    return SparseConvTensor.from_sparse(tensor)


register_tree(SparseConvTensor, _made, _check_alone)


__getattr__ = lacking(
    __name__,
    {
        "ThrustSortAllocator": "Nothing here needs an allocator.",
        "scatter_nd": "Use x.dense(), or torch.index_put.",
    },
)
