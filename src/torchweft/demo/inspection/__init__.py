"""What a cloud costs as voxels: numbers, plots and the page of `torchweft inspect`."""
