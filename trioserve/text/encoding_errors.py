"""Error texts for texts that can't be encoded."""

from __future__ import annotations


def reason_of(text: str, error: Exception) -> str:
    """Return the reason for which the tokenizer raised ``error`` for ``text``.

    ``tokenizers`` raises plain Exceptions and TypeErrors, for lone surrogates too.
    """
    try:
        text.encode()
    except UnicodeEncodeError as surrogate:
        return f"character {surrogate.start} is no valid Unicode (half of a surrogate pair)"
    return str(error)
