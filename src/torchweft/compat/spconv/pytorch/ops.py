"""Sizes of outputs; what spconv computes from tables of pairs is in the layers here."""

from collections.abc import Sequence

from torchweft.compat.lacking import lacking
from torchweft.compat.spconv.core import ConvAlgo
from torchweft.voxels.grid import geometry

__all__ = ["ConvAlgo", "get_conv_output_size", "get_deconv_output_size"]


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The spatial shape that a strided layer writes; 0 for an axis shorter than the kernel."""
    sizes = kernel_size, stride, padding, dilation
    return list(geometry(len(input_size), *sizes, mode="strided").output_shape(input_size))


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """The spatial shape that a transposed layer writes, without dilation, as in spconv."""
    sizes = kernel_size, stride, padding
    found = geometry(len(input_size), *sizes, mode="transposed").output_shape(input_size)
    return [n + extra for n, extra in zip(found, output_padding, strict=True)]


_PAIRS = "Read x.find_indice_pair(key), or use torchweft.voxels.kernel_map."
_LAYERS = "Call the layer of spconv.pytorch."

__getattr__ = lacking(
    __name__,
    {
        "get_indice_pairs": _PAIRS,
        "get_indice_pairs_implicit_gemm": _PAIRS,
        "global_pool_rearrange": "Use SparseGlobalMaxPool, or torchweft.voxels.global_pool.",
        "maximum_value_int_": "Use tensor.clamp_(min=value).",
        **dict.fromkeys(
            (
                "fused_indice_conv",
                "implicit_gemm",
                "implicit_gemm_backward",
                "indice_avgpool_implicit_gemm",
                "indice_avgpool_implicit_gemm_backward",
                "indice_conv",
                "indice_conv_backward",
                "indice_maxpool",
                "indice_maxpool_backward",
                "indice_maxpool_implicit_gemm",
                "indice_maxpool_implicit_gemm_backward",
            ),
            _LAYERS,
        ),
    },
)
