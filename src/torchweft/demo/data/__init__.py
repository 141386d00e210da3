"""Where the demo's data comes from: readers of point clouds, molecules, charges, surfaces."""

SUFFIXES = ".npy .npz .pt .csv .txt .xyz .extxyz .las .laz .bin (KITTI) .ply .pcd"
"""Of the files that hold points; here, so that the help of a command needs neither torch nor numpy.
"""
