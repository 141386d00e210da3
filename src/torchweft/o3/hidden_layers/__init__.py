"""The hidden layers of a network of numbers in one launch on a GPU, and their derivatives."""
