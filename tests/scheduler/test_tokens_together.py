"""Images whose tokens come together: no step ends within one, and none waits for ever."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np

from tests.scheduler.test_prompt_pace import MACHINES, Oracle
from tests.support.scheduling import Bench, make_request
from trioserve.requests.embedded import ContentIds, EmbeddedSpan, count_uncut
from trioserve.requests.request import Sequence, State
from trioserve.testing import FakeWorker
from trioserve.testing.fake_model import EMBEDDING_WIDTH, draw, embedded_token

LENGTH = 6
IMAGES = np.random.default_rng(1).normal(size=(3, LENGTH, EMBEDDING_WIDTH)).astype(np.float32)
NUM_SEQS = 4


def span_of(image: int, start: int) -> EmbeddedSpan:
    span = EmbeddedSpan.of(start, IMAGES[image], "float32")
    return attrs.evolve(span, is_together=True)


@attrs.define(eq=False)
class Life:
    """A scheduler that gets prompts with images, and checks the rows of its plans."""

    bench: Bench
    dice: random.Random
    contents: ContentIds = attrs.field(factory=ContentIds)
    contexts: dict[Sequence, list[int]] = attrs.field(factory=dict)
    """Prompts with the tokens that stand for embeddings."""
    num_hits_within: int = 0
    """Cached prefixes that ended within an image."""

    def submit(self, parts: list[list[int] | int], **fields: Any) -> Sequence:
        """Submit a prompt of texts and of images by their numbers."""
        ids: list[int] = []
        context: list[int] = []
        spans: list[EmbeddedSpan] = []
        for part in parts:
            if isinstance(part, int):
                spans.append(span_of(part, len(ids)))
                context += [embedded_token(row) for row in IMAGES[part]]
                part = [0] * LENGTH
            else:
                context += part
            ids += part
        request = make_request(ids, arrived=self.bench.now, **fields)
        request.embedded = spans
        request.name_contents(self.contents)
        self.bench.core.submit(request, self.bench.now)
        (sequence,) = request.sequences
        self.contexts[sequence] = context
        return sequence

    def submit_any(self) -> None:
        """Submit a random prompt; many begin alike."""
        parts: list[list[int] | int] = []
        for _ in range(self.dice.randint(1, 3)):
            parts.append([self.dice.randint(1, 2)] * self.dice.choice([1, 2, 5, 9]))
            parts.append(self.dice.randrange(3))
        parts.append([3] * self.dice.randint(1, 6))
        self.submit(parts, max_tokens=self.dice.randint(1, 12))

    def step(self) -> None:
        bench = self.bench
        if bench.plan() is not None:
            opened = {slot.slot: slot.computed for slot in bench.plans[-1].opened}
            for seq_state, _, _ in bench.core.in_flight[-1].rows:
                cached = opened.get(seq_state.slot, 0)
                for span in seq_state.sequence.request.embedded:
                    assert not span.start < seq_state.planned < span.stop, "an image is cut"
                    self.num_hits_within += span.start < cached < span.stop
        if bench.results:
            bench.result()

    def check_outputs(self) -> None:
        for sequence, context in self.contexts.items():
            assert sequence.state is State.FINISHED
            for token in sequence.output_ids:
                assert token == draw(self.bench.worker.token, context, sequence.sampler)
                context.append(token)


def make_life(seed: int, **worker: Any) -> Life:
    options = {"num_pages": 22, "page_size": 4, "max_num_seqs": NUM_SEQS}
    fake = FakeWorker(**{**options, "max_num_batched_tokens": LENGTH + NUM_SEQS - 1, **worker})
    return Life(Bench.make(fake), random.Random(seed))


def test_counts_end_before_or_behind_what_comes_together() -> None:
    spans = [span_of(0, 4), span_of(1, 12), attrs.evolve(span_of(2, 20), is_together=False)]
    for start, count, most, wanted in (
        (0, 4, 9, 4),
        (0, 5, 9, 4),  # before an image
        (0, 10, 99, 10),
        (0, 14, 99, 12),
        (4, 2, 6, 6),  # the whole image, above the count
        (4, 2, 5, 0),
        (7, 1, 3, 3),  # what isn't cached of it
        (7, 1, 2, 0),
        (10, 9, 9, 9),
        (18, 5, 5, 5),
    ):
        assert count_uncut(spans, start, count, most) == wanted


def test_no_step_ends_within_an_image() -> None:
    """With cached prefixes that do, and with preemptions."""
    num_preemptions = num_hits = 0
    for seed in range(12):
        life = make_life(seed)
        for _ in range(60):
            if life.dice.random() < 0.5:
                life.submit_any()
            life.step()
        while any(sequence.state is not State.FINISHED for sequence in life.contexts):
            life.step()
        life.check_outputs()
        num_preemptions += life.bench.core.statistics().num_preemptions
        num_hits += life.num_hits_within
    assert num_preemptions > 5
    assert num_hits > 5


def test_an_image_does_not_wait_for_streams() -> None:
    """A step takes longer for it than the target allows."""
    life = make_life(0, num_pages=400, max_model_len=1024)
    life.bench = Bench.make(life.bench.worker, itl_target=1e-9)
    life.bench.core.step_times = Oracle(MACHINES["no vectors"])
    for number in range(NUM_SEQS - 1):
        life.submit([[number + 1]], max_tokens=400)
    image = life.submit([[7], 0, [8, 9]], max_tokens=2)
    for _ in range(20):
        life.step()
    assert len(image.output_ids) == 2
