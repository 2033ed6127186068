"""Check, by the plans, that requests with a common prefix compute it once.

Two rows of one plan never compute the same page of a prompt, even if two requests arrive together
and neither finds the page in the cache. Requests with log-probabilities of their prompt compute the
whole prompt, so they are left out.
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
    """All tokens known when the slot was opened."""
    planned: int


@attrs.define(eq=False)
class SharingChecker:
    """The progress of the prompt in each open slot, by the plans."""

    page_size: int
    namespace_of: Callable[[int], object]
    """Returns the cache salt and adapter of a client; equal ones can share prefixes."""
    enabled: bool
    _prompts: dict[int, _Prompt] = attrs.field(factory=dict)

    def opened(self, slot: wire.OpenSlot, client: int) -> None:
        """Record that a plan opens ``slot`` for a request of ``client``."""
        self._prompts.pop(slot.slot, None)
        # A beam that goes on with another token is opened anew, with the pages that it has.
        is_beam = slot.sampler.processed_logprobs
        reports = (slot.prompt_logprobs_from, slot.states_from, slot.context_logits_from)
        if self.enabled and max(reports) == -1 and not is_beam:
            tokens = wire.ints(slot.tokens).tolist()
            self._prompts[slot.slot] = _Prompt(self.namespace_of(client), tokens, slot.computed)

    def planned(self, rows: Iterable[tuple[int, int]]) -> None:
        """Check a plan's rows, pairs of slot and number of tokens."""
        seen: dict[tuple[object, tuple[int, ...]], int] = {}
        size = self.page_size
        for slot, count in rows:
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            start, prompt.planned = prompt.planned, prompt.planned + count
            # The last token is computed for its logits, even if another request has its page.
            stop = min(prompt.planned, len(prompt.tokens) - 1)
            for end in range((start // size + 1) * size, stop + 1, size):
                key = (prompt.namespace, tuple(prompt.tokens[:end]))
                other = seen.setdefault(key, slot)
                if other != slot:
                    raise Violation(
                        "a shared page is computed once",
                        f"page before token {end}, slots {other} and {slot}",
                    )
