"""Why a text can't be encoded, in words for whoever wrote it."""

from __future__ import annotations


def reason_of(text: str, error: Exception) -> str:
    """What is wrong with ``text``, at which the tokenizer has raised ``error``.

    ``tokenizers`` raises plain Exceptions and TypeErrors, for lone surrogates too.
    """
    try:
        text.encode()
    except UnicodeEncodeError as surrogate:
        return f"character {surrogate.start} is no valid Unicode (half of a surrogate pair)"
    return str(error)
