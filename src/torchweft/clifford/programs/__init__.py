"""The geometric product and the fused chain as programs: operator, printed kernels, launch."""
