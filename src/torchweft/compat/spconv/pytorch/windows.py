"""What convolutions and pools share: a window on the voxels, a key, and the count of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweft.compat.spconv.core import ConvAlgo
from torchweft.compat.spconv.pytorch.core import SparseConvTensor, expand_nd
from torchweft.compat.spconv.pytorch.modules import SparseModule
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.grid import geometry

__all__ = ["WindowModule"]

COUNT = "max_num_voxels_during_training"


class WindowModule(SparseModule):
    """A layer with a window, one number per axis in lists, as spconv keeps them.

    Args:
        ndim: number of axes.
        sizes: kernel_size, stride (None is the kernel's size), padding and dilation.
        mode: of torchweft's geometry: "submanifold", "strided" or "transposed".
        inverse: whether it undoes the layer of its key.
        indice_key: names its pairs.
        algo: kept; it has no effect.
        record_voxel_count: keeps the most outputs in a buffer.
        name: of the module.
    """

    def __init__(
        self,
        ndim: int,
        sizes: tuple[Any, Any, Any, Any],
        mode: str,
        indice_key: str | None,
        algo: ConvAlgo | None,
        record_voxel_count: bool,
        name: str | None,
        inverse: bool = False,
    ) -> None:
        super().__init__(name=name)
        kernel_size, stride, padding, dilation = sizes
        self.ndim, self.indice_key = ndim, indice_key
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = expand_nd(ndim, kernel_size if stride is None else stride)
        self.padding, self.dilation = expand_nd(ndim, padding), expand_nd(ndim, dilation)
        self.subm, self.transposed = mode == "submanifold", mode == "transposed"
        self.inverse = inverse
        self.algo = ConvAlgo.MaskImplicitGemm if algo is None else algo
        steps = [1] * ndim if self.subm else self.stride  # which a submanifold layer ignores
        axes = tuple(self.kernel_size), tuple(steps), tuple(self.padding), tuple(self.dilation)
        self.geometry = geometry(ndim, *axes, mode=mode)
        self.record_voxel_count = record_voxel_count
        if record_voxel_count and not self.subm and not inverse:
            self.register_buffer(COUNT, torch.zeros(1, dtype=torch.int32))
            self.register_load_state_dict_pre_hook(_with_count)  # type: ignore[no-untyped-call]

    def get_max_num_voxels(self) -> Tensor | None:
        """(1,) the most outputs so far, with record_voxel_count; else None."""
        found: Tensor | None = getattr(self, COUNT, None)
        return found

    def count(self, outputs: SparseConvTensor) -> None:
        """Keep the number of outputs if it is the largest so far."""
        most = self.get_max_num_voxels()
        if most is not None:
            most.clamp_(min=len(outputs.indices))

    def check(self, input: object) -> None:
        """Raise unless it is a SparseConvTensor of as many axes.

        Raises:
            DTypeError: it is something else.
            ShapeError: it has other axes.
        """
        name = type(self).__name__
        if not isinstance(input, SparseConvTensor):
            raise DTypeError(
                f"{name} was given a {type(input).__name__}: it takes a SparseConvTensor. Chain "
                "modules with SparseSequential."
            )
        if len(input.spatial_shape) != self.ndim:
            raise ShapeError(
                f"{name} was given voxels of {len(input.spatial_shape)} axes: it needs "
                f"{self.ndim}. Use the layer for {len(input.spatial_shape)}."
            )

    def check_new_key(self, input: SparseConvTensor) -> None:
        """Raise if the key was given before: only submanifold layers share one."""
        if input.find_indice_pair(self.indice_key) is not None:
            raise ShapeError(
                f"{type(self).__name__} has indice_key={self.indice_key!r}, under which a layer "
                "before left its pairs: only submanifold layers share a key. Give this layer "
                "another."
            )

    def extra_repr(self) -> str:
        """The window, as spconv prints it."""
        names = ("kernel_size", "stride", "padding", "dilation", "algo")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _with_count(module: WindowModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint from before the count was recorded has none."""
    state.setdefault(prefix + COUNT, torch.zeros(1, dtype=torch.int32))
