"""The refusal of a part in a child process. The server adds the part's name."""

from __future__ import annotations

_MAX_CHARACTERS = 200


class Refused(Exception):
    """A part that can't be read; the text says why, and follows the part's name."""


class ArgumentsRefused(Refused):
    """A part that can't be read with the arguments that its request has for it."""


def check_seconds(kind: str, seconds: float, max_seconds: float) -> None:
    """Refuse a part of more than ``max_seconds``.

    Raises:
        Refused: It has more.
    """
    if seconds > max_seconds:
        raise Refused(
            f"the {kind} has {seconds:.1f} seconds, more than --limit-mm-seconds "
            f"({max_seconds:g}) allows"
        )


def undecodable(kind: str, error: BaseException) -> Refused:
    """Return the refusal of a damaged file, with the decoder's reason."""
    reason = str(error) or type(error).__name__
    return Refused(f"the {kind} can't be decoded: {reason[:_MAX_CHARACTERS]}")
