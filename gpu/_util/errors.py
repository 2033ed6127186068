"""Errors in a line."""

from __future__ import annotations


def summarize(error: Exception) -> str:
    """Return the type of an exception and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
