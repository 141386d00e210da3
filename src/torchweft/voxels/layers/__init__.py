"""Modules on sparse tensors: convolutions, norms, pools, voxelization, checkpoints."""
