"""The error of a wrong command line."""

from __future__ import annotations


class UsageError(Exception):
    """A wrong option or argument. The message is one line."""
