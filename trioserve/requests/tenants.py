"""Tenants of an engine, such as the API keys of a server, and their shares of what is bounded."""

from __future__ import annotations

import attrs


def excess(own: int, new: int, others: int, limit: int) -> int:
    """Return by how much ``new`` exceeds a tenant's share; at most 0 if it is within it.

    A tenant may take half of the room that the others leave. So there is always room for one that
    comes later, and no number of tenants has to be known. Its first is always within its share.

    Args:
        own: What the tenant takes already.
        new: What it asks for in addition.
        others: What all others take.
        limit: The bound of all together.
    """
    return own + new - (limit - others) // 2 if own else 0


@attrs.define
class TenantCounts:
    """Numbers of sequences and of their tokens, by tenant. The tenant ``""`` isn't counted."""

    _counts: dict[str, tuple[int, int]] = attrs.field(init=False, factory=dict)
    """Without zeros."""

    def add(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        """Add numbers of sequences and tokens, which may be negative."""
        if not tenant:
            return
        sequences, tokens = self.of(tenant)
        self._counts[tenant] = sequences + num_sequences, tokens + num_tokens
        if self._counts[tenant] == (0, 0):
            del self._counts[tenant]

    def of(self, tenant: str) -> tuple[int, int]:
        """Return the numbers of sequences and of tokens of ``tenant``."""
        return self._counts.get(tenant, (0, 0))
