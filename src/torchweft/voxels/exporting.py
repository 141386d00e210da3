"""Sparse convolutions in ONNX, by its standard operators.

    y[o] = bias + (x[sources[0, o]], x[sources[1, o]], …) @ weight

Rows are gathered for all offsets and multiplied at once; −1 reads a row of zeros behind the last.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from torchweft.errors import BackendError, ShapeError

__all__ = ["onnx_translations"]

INT64 = 7
"""ONNX's number of the type."""


def onnx_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export` needs to translate sparse convolutions, as a table.

    The program is one of `torch.export` whose argument is a SparseTensor with its maps, so that
    tables are inputs of the model: runtimes have no operator that builds maps. The result holds
    standard operators only. Pools of windows and samples are not translated.

        program = torch.export.export(network, (tensor,), dynamic_shapes=shapes)
        table = torchweft.voxels.onnx_translations()
        torch.onnx.export(program, custom_translation_table=table).save("network.onnx")

    Returns:
        The table, for `custom_translation_table`.

    Raises:
        BackendError: onnxscript is not installed.
        ShapeError: in the export, a table of which half is stored, as programs for GPUs have.

    Cost: the gathered rows are stored, K · N_out · C_in numbers. Sums run in the features' dtype.

    Example:
        >>> from torchweft import voxels
        >>> table = voxels.onnx_translations()  # doctest: +SKIP
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise BackendError(
            "onnxscript is not installed: operators of ONNX are written with it. Run pip install "
            "onnx onnxscript, or pip install 'torchweft[onnx]'."
        )
    from onnxscript import opset18

    return {torch.ops.torchweft.voxel_convolution.default: _Convolution(opset18)}


class _Convolution:
    """The translation of `torchweft::voxel_convolution`.

    Args:
        op: the operators of ONNX.
    """

    def __init__(self, op: Any) -> None:
        self._op = op

    def __call__(  # the exporter passes the operator's arguments
        self,
        x: Any,
        weight: Any,
        bias: Any,
        table: Any,
        back: Any,
        in_order: Any,
        out_order: Any,
        offsets: int,
        groups: int,
        precision: str,
        backend: str,
    ) -> Any:
        """A sequence with the features of the outputs, in their order."""
        op = self._op
        if table.shape[0] != offsets:
            raise ShapeError(
                f"the program has a table of {table.shape[0]} rows for {offsets} offsets: half of "
                "it is stored, as on a GPU. Export the network and its tensor on the CPU: "
                "network.cpu(), tensor.cpu()."
            )
        y = self._products(x, weight, table, offsets, groups)
        y = y if bias is None else op.Add(y, bias)
        if out_order is not None:  # row order[i] of the result is row i of y
            places = op.Unsqueeze(op.Cast(out_order, to=INT64), self._ints(1))
            y = op.ScatterND(op.Sub(y, y), places, y)
        return op.SequenceConstruct(y)

    def _products(self, x: Any, weight: Any, table: Any, offsets: int, groups: int) -> Any:
        """(M, C_out): for each group, one product over all offsets and channels."""
        op = self._op
        inner, outer = weight.shape[1], weight.shape[2] // groups
        zeros = op.Pad(x, self._ints(0, 0, 1, 0))
        rows = op.Gather(zeros, op.Transpose(table, perm=[1, 0]), axis=0)
        rows = op.Reshape(rows, self._ints(-1, offsets, groups, inner))
        rows = op.Reshape(
            op.Transpose(rows, perm=[2, 0, 1, 3]), self._ints(groups, -1, offsets * inner)
        )
        weight = op.Reshape(weight, self._ints(offsets, inner, groups, outer))
        weight = op.Reshape(
            op.Transpose(weight, perm=[2, 0, 1, 3]), self._ints(groups, offsets * inner, outer)
        )
        y = op.Transpose(op.MatMul(rows, weight), perm=[1, 0, 2])
        return op.Reshape(y, self._ints(-1, groups * outer))

    def _ints(self, *values: int) -> Any:
        return self._op.Constant(value_ints=list(values))
