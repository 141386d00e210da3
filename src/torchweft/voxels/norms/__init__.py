"""Batch norms with what follows them: a residual and an activation, in one pass each way."""
