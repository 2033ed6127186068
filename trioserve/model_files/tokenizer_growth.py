"""A limit of how much a tokenizer's file may lengthen texts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

MAX_GROWTH = 64
"""Largest factor by which replacements may lengthen a text; 1 or 2 is usual."""


MAX_TEMPLATE_TOKENS = 1024
"""Most special tokens that a template may put around a text."""
MAX_ADDED_TOKENS = 1 << 18
"""Most tokens beside the vocabulary; loading this many takes five seconds."""


class _Description(msgspec.Struct):
    """The parts of a tokenizer's file that change texts."""

    post_processor: Any = None
    added_tokens: Any = None

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def check_growth(data: bytes) -> None:
    """Check the replacements and templates in a tokenizer's file, and the number of its tokens.

    Raises:
        ValueError: Texts can become too long, there are too many tokens, or the file isn't JSON.
    """
    try:
        description = msgspec.json.decode(data, type=_Description)
        growths = {
            name: _growth(getattr(description, name))
            for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor")
        }
        num_special = _template_tokens(description.post_processor)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON object: {error}") from error
    for name, growth in growths.items():
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} makes texts up to {growth} times as long; at most {MAX_GROWTH} times "
                "is served"
            )
    if num_special > MAX_TEMPLATE_TOKENS:
        raise ValueError(
            f"its post_processor puts {num_special} tokens around a text; at most "
            f"{MAX_TEMPLATE_TOKENS} are served"
        )
    added = description.added_tokens
    if isinstance(added, list) and len(added) > MAX_ADDED_TOKENS:
        raise ValueError(f"it has {len(added)} added tokens; at most {MAX_ADDED_TOKENS} are served")


def _growth(step: Any) -> int:
    """Return the factor by which a step may lengthen a text."""
    if not isinstance(step, dict):
        return 1
    growth = 1
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        steps = step.get(name)
        for each in steps if isinstance(steps, list) else ():
            growth = min(growth * _growth(each), 1 << 40)
    growth *= max(1, *(_copies(step.get(name)) for name in ("single", "pair")))
    prepended = step.get("prepend")
    if isinstance(prepended, str):  # It may precede each piece between special tokens.
        growth *= 1 + len(prepended)
    content = step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return growth
    pattern = step.get("pattern")
    plain = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(plain, str) and plain:
        return growth * max(1, -(-len(content) // len(plain)))
    return growth * (1 + len(content))  # A regex may match at each character, or between two.


def _copies(template: Any) -> int:
    """Return the number of times that a template repeats a text."""
    pieces = template if isinstance(template, list) else []
    sequences = [each.get("Sequence") for each in pieces if isinstance(each, dict)]
    ids = Counter(str(each.get("id")) for each in sequences if isinstance(each, dict))
    return max(ids.values(), default=0)


def _template_tokens(step: Any) -> int:
    """Return the most tokens that the templates of a step put around a text."""
    if not isinstance(step, dict):
        return 0
    steps = step.get("processors")
    total = sum(map(_template_tokens, steps if isinstance(steps, list) else ()))
    known = step.get("special_tokens")
    known = known if isinstance(known, dict) else {}
    most = 0
    for name in ("single", "pair"):
        template = step.get(name)
        count = 0
        for piece in template if isinstance(template, list) else ():
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            token = known.get(str(special.get("id"))) if isinstance(special, dict) else None
            ids = token.get("ids") if isinstance(token, dict) else None
            count += len(ids) if isinstance(ids, list) else 0
        most = max(most, count)
    return total + most
