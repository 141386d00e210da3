"""The hidden layers of a network of numbers, by one kernel on a GPU."""
