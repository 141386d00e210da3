"""Flags of pykeops' compiler that programs set; they have no effect: there is no compiler."""

from torchweft.compat.lacking import lacking

__all__ = ["__version__", "auto_factorize", "debug_ops", "debug_ops_at_exec", "verbose"]

__version__ = "2.3"
verbose = True
auto_factorize = debug_ops = debug_ops_at_exec = False

_COMPILERS = "There is no compiler to configure: leave it out."

__getattr__ = lacking(
    __name__,
    {
        "check_health": "Run python -m torchweft doctor.",
        "clean_keops": "Kernels are kept by their content: there is nothing to clean.",
        "show_cuda_status": "Call torch.cuda.is_available().",
        **dict.fromkeys(
            (
                "build_folder",
                "cuda_block_size",
                "cuda_config",
                "config",
                "openmp_config",
                "platform_detector",
                "set_build_folder",
                "show_gpu_config",
            ),
            _COMPILERS,
        ),
    },
)
