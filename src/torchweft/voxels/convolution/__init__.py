"""Sparse convolution: functions, operator, kernels, launch, the CPU."""
