"""A stand-in for torch_scatter 2.1: its names and conventions over torchweft.products.

All its functions, with `out=`, `dim_size=`, indices of any dimensions, and the places of extremes;
torch_geometric finds it.  An index of one dimension, or broadcast from one, is sorted once and kept
as the tables of torchweft.products are; one that varies with other dimensions becomes a table of
all numbers.

It differs where the original would give a wrong number, or another one at each run:

- sums and means repeat to the bit, also on a GPU; 16-bit sums are formed in float32;
- NaN is the extreme of a place that has one; of equal extremes the first has place and gradient;
- gradients of any order, and through `out`; indices of int32 too; `segment_coo` takes any order;
- values of tables are checked on the CPU always, on a GPU under TORCHWEFT_CHECK=1.

`scatter_mul` is torch's scatter_reduce.  Lacking: torch.jit.script of its functions, its operators
`torch.ops.torch_scatter`, and `torch_scatter.testing`.
"""

from torchweft.compat.lacking import lacking
from torchweft.compat.torch_scatter import composite, utils
from torchweft.compat.torch_scatter.composite import (
    scatter_log_softmax,
    scatter_logsumexp,
    scatter_softmax,
    scatter_std,
)
from torchweft.compat.torch_scatter.scatter import (
    scatter,
    scatter_add,
    scatter_max,
    scatter_mean,
    scatter_min,
    scatter_mul,
    scatter_sum,
)
from torchweft.compat.torch_scatter.segment_coo import (
    gather_coo,
    segment_add_coo,
    segment_coo,
    segment_max_coo,
    segment_mean_coo,
    segment_min_coo,
    segment_sum_coo,
)
from torchweft.compat.torch_scatter.segment_csr import (
    gather_csr,
    segment_add_csr,
    segment_csr,
    segment_max_csr,
    segment_mean_csr,
    segment_min_csr,
    segment_sum_csr,
)

__all__ = [
    "__version__",
    "composite",
    "gather_coo",
    "gather_csr",
    "scatter",
    "scatter_add",
    "scatter_log_softmax",
    "scatter_logsumexp",
    "scatter_max",
    "scatter_mean",
    "scatter_min",
    "scatter_mul",
    "scatter_softmax",
    "scatter_std",
    "scatter_sum",
    "segment_add_coo",
    "segment_add_csr",
    "segment_coo",
    "segment_csr",
    "segment_max_coo",
    "segment_max_csr",
    "segment_mean_coo",
    "segment_mean_csr",
    "segment_min_coo",
    "segment_min_csr",
    "segment_sum_coo",
    "segment_sum_csr",
    "utils",
]

__version__ = "2.1.2"

__getattr__ = lacking(
    __name__,
    {
        "cuda_version": "Kernels are Triton's: torch.version.cuda is the version of CUDA.",
        "placeholder": "It stands for operators that were not built: use the functions.",
        "testing": "It is the tables of its own tests: use torch.testing.",
    },
)
