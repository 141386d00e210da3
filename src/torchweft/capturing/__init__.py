"""`torchweft.capture`: functions whose launches are recorded once as a CUDA graph and replayed."""
