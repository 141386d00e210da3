"""What a call says: options, layout of arguments, signature, and the kernel it asks for."""
