"""Products that mix features, as matrix products: linear maps with bias, fully connected ones."""
