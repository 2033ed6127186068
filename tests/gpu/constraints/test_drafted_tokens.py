"""Grammars over rows of several tokens: outputs are those of one token a step."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu.constraints.adjuster import ROWS_FOR_THREADS, Constraints, _MatcherState
from gpu.constraints.grammar_cache import GrammarCache
from gpu.executor import NO_COPIES, Copies, Finished, Submission
from gpu.runner import Runner
from gpu.sampling.drawn import Drawn
from gpu.slots import Row, Slot, SlotTable
from tests.support.grammar_vocabularies import EOS, VOCABULARY, allowed_of, ids_of
from tests.support.plans import PlanMaker
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import NO_TOKEN, SamplerParams

VOCAB_SIZE = VOCABULARY.vocab_size
PROMPT = [5, 9, 9]
MAX_TOKENS = 40
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": Grammar("regex", r"(ab|c[de]{2,5}|[x-z]+-[0-9]{3}){3,6}"),
    "json": Grammar("json_schema", json.dumps(PERSON)),
    "choice": Grammar("choice", json.dumps(["zyx-zyx-zyx-w", "zyx-zyx-zyx-zyx", "zyxwvu-zyxwvu"])),
    "lark": Grammar("grammar", 'start: item item item item\nitem: "(" item ")" | /[0-9]{3}/'),
}

Propose = Callable[[int], int]
"""Function that returns a draft beside the token that will be drawn."""


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCache]:
    cache = GrammarCache(VOCABULARY)
    yield cache
    cache.close()


def extended(slot: Slot, tokens: Sequence[int]) -> Slot:
    """Return a copy of ``slot`` with ``tokens`` behind its own."""
    buffer = np.array([*slot.tokens, *tokens], dtype=np.int32)
    return Slot(
        number=slot.number, generation=slot.generation, prompt_length=slot.prompt_length,
        computed=slot.computed, sampler=slot.sampler, buffer=buffer, length=len(buffer),
    )  # fmt: skip


@attrs.define
class Verifying:
    """An executor that draws a row's tokens one by one, as long as its drafts are those tokens.

    The model has equal logits; a token follows from the mask and the tokens before it.
    """

    constraints: Constraints
    propose: Propose
    num_accepted: int = 0
    num_rejected: int = 0

    @property
    def completions(self) -> None:
        return None

    def open(self, slot: Slot) -> None:
        self.constraints.open(slot)

    def close(self, number: int) -> None:
        self.constraints.close(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        sampling = [row for row in rows if row.samples]
        drawn: list[list[int]] = [[] for _ in sampling]
        going = list(range(len(sampling)))
        while going:
            slots = [extended(sampling[index].slot, drawn[index]) for index in going]
            for index, token in zip(going, self._draw(slots), strict=True):
                drawn[index].append(token)
            going = [index for index in going if self._accepts(sampling[index], drawn[index])]
        tokens = np.array([token for each in drawn for token in each], dtype=np.int32)
        return Finished(Drawn(tokens=tokens, counts=np.array([len(each) for each in drawn])))

    def _draw(self, slots: Sequence[Slot]) -> list[int]:
        adjustment = self.constraints.adjustment(torch.zeros(len(slots), VOCAB_SIZE), slots)
        assert adjustment.bitmask is not None
        return [choose(slot, mask) for slot, mask in zip(slots, adjustment.bitmask, strict=True)]

    def _accepts(self, row: Row, drawn: list[int]) -> bool:
        """Return True if the draft beside the newest token was right and another one follows."""
        if len(drawn) > row.drafts or drawn[-1] in (*EOS, NO_TOKEN):
            return False
        is_right = self.propose(drawn[-1]) == drawn[-1]
        self.num_accepted += is_right
        self.num_rejected += not is_right
        return is_right


def choose(slot: Slot, mask: npt.NDArray[np.int32]) -> int:
    ids = sorted(allowed_of(mask.tobytes()) & set(range(VOCAB_SIZE)))
    return ids[zlib.crc32(slot.tokens.tobytes()) % len(ids)] if ids else NO_TOKEN


class Showing(Verifying):
    """An executor that asks for the mask behind each draft before it knows the draft is right."""

    def _accepts(self, row: Row, drawn: list[int]) -> bool:
        draft = self.propose(max(drawn[-1], 0))
        self._draw([extended(row.slot, [*drawn[:-1], draft])])
        return super()._accepts(row, drawn)


def outputs(executor: Verifying, asked: Sequence[Grammar], most: int, reopens: int = 0) -> list[
    list[int]
]:  # fmt: skip
    """Return the tokens of a slot for each grammar, from rows of up to ``most`` tokens.

    Every ``reopens`` steps all slots are closed and opened again, as after a preemption.
    """
    slots = SlotTable(
        num_pages=1024, page_size=4, max_model_len=64, vocab_size=VOCAB_SIZE, max_row_tokens=most
    )
    runner = Runner(executor, slots, max_num_batched_tokens=4096)
    maker = PlanMaker(runner.step, num_pages=1024)
    sampler = [
        SamplerParams(stop_ids=list(EOS), grammar=grammar, bad_words=[ids_of("ab")])
        for grammar in asked
    ]
    for number, params in enumerate(sampler):
        maker.open(number, [*PROMPT, number], params)
    known = maker.step(dict.fromkeys(maker.slots, len(PROMPT) + 1))
    for step in range(1, 2 * MAX_TOKENS):
        going = [number for number in maker.slots if not slots[number].stopped]
        rows = {
            number: min(most, 1 + MAX_TOKENS - len(known[number]))
            for number in going
            if len(known[number]) < MAX_TOKENS
        }
        if not rows:
            break
        if reopens and step % reopens == 0:
            for number in rows:
                maker.close(number)
                tokens = [*PROMPT, number, *known[number]]
                maker.open(number, tokens, sampler[number], prompt_length=len(PROMPT) + 1)
                rows[number] = len(tokens)
        # Rows of one token come first in a plan.
        for number, tokens in maker.step(
            dict(sorted(rows.items(), key=lambda row: row[1]))
        ).items():
            known[number] += tokens
            maker.slots[number].computed = slots[number].computed
    return [known[number][:MAX_TOKENS] for number in range(len(asked))]


def proposer(seed: int, right: float) -> Propose:
    """Return a function that proposes the right token with a probability of ``right``."""
    rng = random.Random(seed)

    def propose(token: int) -> int:
        return (token + (rng.random() >= right) * rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE

    return propose


@pytest.mark.parametrize("reopens", [0, 3])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("most", [2, 5])
def test_tokens_are_those_of_one_token_a_step(
    grammars: GrammarCache, most: int, right: float, reopens: int
) -> None:
    asked = list(GRAMMARS.values()) * 5
    assert len(asked) >= ROWS_FOR_THREADS
    alone = Verifying(Constraints(VOCAB_SIZE, grammars), proposer(0, 0.0))
    expected = outputs(alone, asked, 1)
    assert alone.num_accepted == alone.num_rejected == 0
    assert all(expected)
    assert any(tokens[-1] in EOS for tokens in expected)
    drafting = Verifying(Constraints(VOCAB_SIZE, grammars, num_threads=2), proposer(1, right))
    assert outputs(drafting, asked, most, reopens) == expected
    assert bool(drafting.num_accepted) == (right > 0)
    assert bool(drafting.num_rejected) == (right < 1)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_rejected_draft_leaves_no_trace_in_the_matcher(grammars: GrammarCache, name: str) -> None:
    constraints = Constraints(VOCAB_SIZE, grammars)
    drafting = Verifying(constraints, proposer(2, 0.5))
    (tokens,) = outputs(drafting, [GRAMMARS[name]], 4)
    assert drafting.num_rejected
    # The last token has not been needed for a mask.
    matching = constraints._open[0].matching
    assert matching is not None
    assert matching.consumed == len(tokens) - 1
    fresh = grammars.matcher(GRAMMARS[name])
    for token in tokens[:-1]:
        assert fresh.consume_token(token)
    assert matching.matcher.compute_bitmask() == fresh.compute_bitmask()


def newest_only(matching: _MatcherState, output: npt.NDArray[np.int32]) -> None:
    """Plant a defect: consume one token of several."""
    for token in output[max(matching.consumed, len(output) - 1) :].tolist():
        matching.matcher.consume_token(token)
    matching.consumed = len(output)


def test_a_matcher_that_misses_a_token_is_found(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list(GRAMMARS.values())
    expected = outputs(Verifying(Constraints(VOCAB_SIZE, grammars), proposer(0, 0.0)), asked, 1)
    monkeypatch.setattr(_MatcherState, "catch_up", newest_only)
    drafting = Verifying(Constraints(VOCAB_SIZE, grammars), proposer(1, 0.6))
    # Masks made one by one are right all the same; only a slot that is opened again misses some.
    assert outputs(drafting, asked, 4) == expected
    assert outputs(drafting, asked, 4, reopens=3) != expected


def test_a_rejected_draft_that_stays_in_the_matcher_is_found(grammars: GrammarCache) -> None:
    asked = list(GRAMMARS.values())
    expected = outputs(Verifying(Constraints(VOCAB_SIZE, grammars), proposer(0, 0.0)), asked, 1)
    for right in (1.0, 0.5):
        showing = Showing(Constraints(VOCAB_SIZE, grammars), proposer(1, right))
        assert (outputs(showing, asked, 4) == expected) == (right == 1.0)
