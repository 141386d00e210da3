"""A stand-in for pykeops 2.3: its names over torchweft.reductions.

`pykeops.torch` and `pykeops.numpy` have lazy tensors, `Genred`, `KernelSolve`, the generic
functions and `cluster`; `config`, `common` and `utils` what programs read of them.  There is no
compiler of formulas to configure, so `set_verbose`, `clean_pykeops` and `set_build_folder` have no
effect, nor have `default_device_id` (use torch.cuda.set_device) and keopscore's flags.

It differs where the original would give a wrong or no number:

- indices are int64, exact for any number of points;
- `Min`, `Max` and `KMin` have gradients; ranges hold for every entry of a batch;
- halves of `ranges` that are two different masks, of which gradients would be wrong, are refused;
- `solve` ends at ‖residual‖ ≤ eps ‖b‖, and raises where it does not get there;
- sums of float16 are in float32; GPU backends raise where there is no GPU.

Lacking, with an error that says the nearest way: the compilers' configuration,
`KernelLinearSolver`, and pykeops' layers over torch and NumPy (`torchtools`, `numpytools`).  The
modules below the public ones (`common.keops_io`, `common.parse_type`) are not there, nor the
methods by which pykeops' lazy tensors print formula strings (`unary`, `binary`, `join`).
"""

from torchweft.compat.lacking import lacking
from torchweft.compat.pykeops import common, config, numpy, torch
from torchweft.compat.pykeops import config as pykeopsconfig
from torchweft.compat.pykeops.config import get_build_folder, numpy_found, torch_found
from torchweft.compat.pykeops.numpy.test_install import test_numpy_bindings
from torchweft.compat.pykeops.torch.test_install import test_torch_bindings

__all__ = [
    "__version__",
    "clean_pykeops",
    "common",
    "config",
    "default_device_id",
    "get_build_folder",
    "numpy",
    "numpy_found",
    "pykeopsconfig",
    "set_build_folder",
    "set_verbose",
    "test_numpy_bindings",
    "test_torch_bindings",
    "torch",
    "torch_found",
    "verbose",
]

__version__ = "2.3"
verbose = True
default_device_id = 0


def set_verbose(val: bool) -> None:
    """Keep the flag; nothing is printed anyway."""
    global verbose
    verbose = val


def clean_pykeops(recompile_jit_binaries: bool = True) -> None:
    """No effect: kernels are kept by their content, and none is out of date."""


def set_build_folder(path: str | None = None) -> None:
    """No effect: TORCHWEFT_CACHE_DIR names the folder of what is kept."""


__getattr__ = lacking(
    __name__,
    {
        "bin_folder": "Call pykeops.get_build_folder().",
        "build_type": "There is no compiler to configure: leave it out.",
        "check_health": "Run python -m torchweft doctor.",
        "keops_get_build_folder": "Call pykeops.get_build_folder().",
        "pykeops_nvrtc_name": "There is no compiler to configure: leave it out.",
        "show_cuda_status": "Call torch.cuda.is_available().",
    },
)
