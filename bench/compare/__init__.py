"""This server beside others, on one machine in one run: ``python -m bench.compare``."""
