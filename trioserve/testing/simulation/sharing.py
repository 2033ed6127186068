"""Whether a prefix that several prompts have is computed by one of them, as the plans show it.

Within one plan no two rows compute the same page of a prompt. What earlier plans compute is found
in the cache; two that come together are the case in which nothing is there yet. Requests that ask
for their prompt's log-probabilities compute all of it themselves, and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from trioserve.protocol import wire
from trioserve.testing.simulation.trace import Violation


@attrs.define(eq=False)
class _Prompt:
    namespace: object
    tokens: list[int]
    """All that was known when the slot was opened."""
    planned: int


@attrs.define(eq=False)
class Sharing:
    """How far the prompt in each open slot has been given to plans."""

    page_size: int
    namespace_of: Callable[[int], object]
    """What clients whose requests share prefixes have in common: cache salt and adapter."""
    enabled: bool
    _prompts: dict[int, _Prompt] = attrs.field(factory=dict)

    def opened(self, slot: wire.OpenSlot, client: int) -> None:
        """A plan opens ``slot`` for a request of ``client``."""
        self._prompts.pop(slot.slot, None)
        if self.enabled and slot.prompt_logprobs_from == -1:
            tokens = wire.ints(slot.tokens).tolist()
            self._prompts[slot.slot] = _Prompt(self.namespace_of(client), tokens, slot.computed)

    def planned(self, rows: Iterable[tuple[int, int]]) -> None:
        """One plan has rows of so many tokens for these slots."""
        seen: dict[tuple[object, tuple[int, ...]], int] = {}
        size = self.page_size
        for slot, count in rows:
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            start, prompt.planned = prompt.planned, prompt.planned + count
            # The last token is computed for its logits, whoever else has its page.
            stop = min(prompt.planned, len(prompt.tokens) - 1)
            for end in range((start // size + 1) * size, stop + 1, size):
                key = (prompt.namespace, tuple(prompt.tokens[:end]))
                other = seen.setdefault(key, slot)
                if other != slot:
                    raise Violation(
                        "a page is computed by one of those who have it",
                        f"page before token {end}, slots {other} and {slot}",
                    )
