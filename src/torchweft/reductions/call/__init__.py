"""What a call says: signature, options and layout of its tensors, and the kernel it needs."""
