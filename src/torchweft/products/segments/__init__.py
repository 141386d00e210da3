"""Rows reduced over segments: sums, means, extremes, and softmax and its logarithm.

`functions.py` has the public functions.  Sums are products; `operator.py` has the op of maximum and
minimum, whose bodies stand in `launch.py` (Triton), `numba_path.py` and `torch_path.py`.
"""
