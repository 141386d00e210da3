"""What the machine has; the compilers that pykeops configures here are not needed."""

import torch

from torchweft.compat.lacking import lacking
from torchweft.core import files

__all__ = ["get_build_folder", "gpu_available", "numpy_found", "torch_found"]

gpu_available = torch.cuda.is_available()
numpy_found = torch_found = True


def get_build_folder() -> str:
    """The folder of what torchweft keeps between processes."""
    return str(files.home())


_COMPILERS = "There is no compiler to configure: leave it out."

__getattr__ = lacking(
    __name__,
    dict.fromkeys(
        (
            "pykeops_base",
            "pykeops_cpp_name",
            "pykeops_cuda",
            "pykeops_nvrtc_name",
            "pykeops_openmp",
            "python_includes",
        ),
        _COMPILERS,
    ),
)
