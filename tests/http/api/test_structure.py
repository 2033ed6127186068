"""Counting separators outside of texts, as a reader of JSON would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.http.api.schema import structure
from trioserve.http.api.schema.structure import count_outside_texts

TEXTS = st.text(alphabet='\\"{}[]:,ab', max_size=12)
VALUES = st.recursive(
    st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=20,
)


def fields_of(value: Any) -> int:
    """Return how many objects, lists and fields there are in ``value``."""
    if isinstance(value, list):
        return 1 + sum(map(fields_of, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(fields_of, value.values()))
    return 0


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
@given(value=VALUES)
def test_what_stands_in_texts_is_not_counted(block: int, value: Any) -> None:
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_BLOCK", block)
        assert count_outside_texts(body, b"{[:") == fields_of(value)


@pytest.mark.parametrize("body", [b"", b"\\", b'"\\', b'\\"' * 9, b'"' * 9, bytes(range(256)) * 9])
def test_what_is_no_json_is_counted_somehow(body: bytes) -> None:
    assert 0 <= count_outside_texts(body, b"{[:") <= len(body)
