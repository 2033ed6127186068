"""The error of a wrong command line."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """A wrong option; the message is one line."""
