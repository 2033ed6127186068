"""Number formats of weights."""

QUANTIZATIONS = ("auto", "none", "int8", "int4", "w8a8")
ROUNDING = ("int8", "int4", "w8a8")
"""Formats that only the compiled kernels of a CPU have."""
