"""JSON values at the edges: wrong types, extreme numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["JSON", "NUMBERS", "TEXTS"]

NUMBERS = st.one_of(
    st.sampled_from(
        (
            *(0, -1, 1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**9),
            *(-(2**63), 10**20, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308),
            *(float("nan"), float("inf"), float("-inf")),
        )
    ),
    st.integers(-(2**70), 2**70),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(("", "\0", "a\nb", "\x1b[2J", "../../etc/passwd", "\ud800", "é" * 300)),
    st.text(max_size=12),
)
_PLAIN: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JSON: st.SearchStrategy[Any] = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=6,
)
