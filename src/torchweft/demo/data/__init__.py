"""Where the demo's data comes from: readers of point clouds, molecules, charges, surfaces."""
