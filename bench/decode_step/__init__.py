"""Whole decode steps beside their floor: ``python -m bench.decode_step``."""
