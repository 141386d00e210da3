"""The operator boundary: how torch enters an operation, with gradients of any order."""
