"""What one event of a stream costs a server: ``python -m bench.sse``."""
