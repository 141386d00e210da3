"""Products that mix features: linear maps and fully connected products, as matrix products."""
