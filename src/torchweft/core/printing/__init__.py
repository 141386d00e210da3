"""Programs to source: schedule, dialects, and the modules that hold printed kernels."""
