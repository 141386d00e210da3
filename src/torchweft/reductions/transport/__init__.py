"""Optimal transport: Sinkhorn iterations, softmin, multiscale, losses."""
