"""A stand-in for spconv 2.3.8: its names and conventions over torchweft.voxels.

`spconv.pytorch` has the tensor, convolutions, pools, tables and containers; `constants`, `core` and
`utils` what programs read of them.  Parameters have spconv's names, shapes and initial values, so
that checkpoints load strictly both ways.  Arguments that choose among spconv's kernels (algo=,
fp32_accum=, large_kernel_fast_algo=, permanent_thrust_allocator=, force_algo=) are taken and have
no effect: sums are always in float32 or wider.

`torchweft.voxels.prepare`, `padded_sizes` and `torchweft.capture` take its tensor: a network is one
CUDA graph for all clouds.  `SparseConvTensor.from_sparse` and `.sparse()` lead to torchweft's.

It differs where the original would give a wrong or no number:

- rows of a strided layer's output ascend by (batch, s0, s1, …); their order has no meaning;
- `.indices` may be assigned and written to, no map of before is used then; tensors with equal
  numbers of rows but different voxels are refused where spconv adds or reuses them by row;
- `select_by_index` and `+=` work; SparseGlobalAvgPool returns all channels;
- duplicated voxels, and voxels outside of the box, are refused by the first layer.

Lacking, with an error that says the nearest way: quantization and int8, fused activations of a
convolution, groups, output_padding, dilation in transposed layers, submanifold pools, benchmark=
and enable_timer=, SPCONV_SAVED_WEIGHT_LAYOUT, `hash`, `cppcore`, `benchmark`, and the functions of
`ops`, `functional` and `utils` below the layers (pairs, box operations).
"""

from torchweft.compat.lacking import lacking
from torchweft.compat.spconv import constants, core, pytorch, utils
from torchweft.compat.spconv.core import AlgoHint, ConvAlgo

__all__ = [
    "SPCONV_VERSION_NUMBERS",
    "AlgoHint",
    "ConvAlgo",
    "__version__",
    "constants",
    "core",
    "pytorch",
    "utils",
]

__version__ = "2.3.8"
SPCONV_VERSION_NUMBERS = [2, 3, 8]

__getattr__ = lacking(
    __name__,
    {
        "algo": "Kernels are chosen by torchweft: leave algo= as it is.",
        "benchmark": "Use torch.profiler, or torchweft's benchmarks.",
        "core_cc": "There is no compiled module: use the layers of spconv.pytorch.",
        "cppconstants": "There is no compiled module: use the layers of spconv.pytorch.",
        "debug_utils": "Errors say what was given and what is needed.",
        "tools": "Use torch.profiler for times.",
    },
)
