"""Constants that programs read or set; those that choose among spconv's kernels have no effect.

SPCONV_ALLOW_TF32 = True multiplies float32 features in TF32, as in spconv.
"""

import os

SPCONV_ALLOW_TF32 = False
SPCONV_USE_DIRECT_TABLE = True
SPCONV_FX_TRACE_MODE = False
SPCONV_DEBUG_SAVE_PATH = ""
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
SAVED_WEIGHT_LAYOUT = os.getenv("SPCONV_SAVED_WEIGHT_LAYOUT", "")

if SAVED_WEIGHT_LAYOUT not in ("", "KRSC"):
    raise NotImplementedError(
        f"SPCONV_SAVED_WEIGHT_LAYOUT is {SAVED_WEIGHT_LAYOUT}: torchweft's stand-in reads weights "
        "in KRSC only, (C_out, k…, C_in). Unset it, and permute the checkpoint's weights once."
    )
