"""What the engine tells whoever listens, asked for piece by piece: trtllm-serve's endpoints."""
