"""`Genred`, for tensors of torch."""

from torchweft.compat.lacking import lacking
from torchweft.reductions import Genred

__all__ = ["Genred"]

_AUTOGRAD = "Call Genred: it is differentiable, to any order."

__getattr__ = lacking(
    __name__,
    {
        "GenredAutograd": _AUTOGRAD,
        "GenredAutograd_base": _AUTOGRAD,
        "GenredAutograd_fun": _AUTOGRAD,
        "Genred_parameters": "Pass the keywords of Genred.",
        "check_AD_supported": "Every formula is differentiable.",
        "set_device": "Pass device_id=, or use torch.cuda.set_device.",
    },
)
