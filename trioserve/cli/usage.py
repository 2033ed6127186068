"""The error of a wrong command line."""

from __future__ import annotations


class UsageError(Exception):
    """A wrong option; the message is one line."""
