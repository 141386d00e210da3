"""Scalar expressions: build, share, differentiate, run in torch."""
