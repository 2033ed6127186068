"""Random JSON schemas with short values, for tests of structured output."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies

__all__ = ["schemas"]

# Without it a random walk spends its tokens on blanks.
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
_NAMES = strategies.sampled_from(["a", "the", "in ing", "é", "k_1"])
_PATTERNS = strategies.sampled_from(["^[a-c]{1,4}$", "^(the|in)( on)?$", "^x\\d{2}-\\d$"])
_CONSTANTS = strategies.one_of(
    strategies.none(), strategies.booleans(), strategies.integers(-99, 99), _NAMES
)


@strategies.composite
def _strings(draw: strategies.DrawFn) -> dict[str, Any]:
    if draw(strategies.booleans()):
        return {"type": "string", "pattern": draw(_PATTERNS)}
    least = draw(strategies.integers(0, 4))
    return {
        "type": "string",
        "minLength": least,
        "maxLength": least + draw(strategies.integers(0, 5)),
    }


@strategies.composite
def _numbers(draw: strategies.DrawFn) -> dict[str, Any]:
    least = draw(strategies.integers(-1000, 1000))
    most = least + draw(strategies.integers(0, 2000))
    kind = draw(strategies.sampled_from(["integer", "integer", "number"]))
    if kind == "number":
        return {"type": kind, "minimum": least, "maximum": most}
    return {"type": kind, "minimum": least, "exclusiveMaximum": most + 1}


def _arrays(items: strategies.SearchStrategy[dict[str, Any]]) -> strategies.SearchStrategy[Any]:
    return strategies.builds(
        lambda each, least, more: {
            "type": "array", "items": each, "minItems": least, "maxItems": least + more
        },
        items, strategies.integers(0, 2), strategies.integers(0, 2),
    )  # fmt: skip


@strategies.composite
def _objects(
    draw: strategies.DrawFn, values: strategies.SearchStrategy[dict[str, Any]]
) -> dict[str, Any]:
    properties = draw(strategies.dictionaries(_NAMES, values, max_size=3))
    required = [name for name in properties if draw(strategies.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_PLAIN = strategies.one_of(
    _strings(),
    _numbers(),
    strategies.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    strategies.lists(_CONSTANTS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _CONSTANTS.map(lambda value: {"const": value}),
)


def schemas() -> strategies.SearchStrategy[dict[str, Any]]:
    """Nested objects and arrays, enums, constants, ranges, patterns and unions."""
    nested = strategies.recursive(
        _PLAIN,
        lambda inner: strategies.one_of(
            _objects(inner),
            _arrays(inner),
            strategies.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
        ),
        max_leaves=6,
    )
    return nested.map(lambda schema: {**schema, **_COMPACT})
