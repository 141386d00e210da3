"""What users write: lazy tensors, Genred, generic functions, linear solves."""
