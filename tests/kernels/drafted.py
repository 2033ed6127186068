"""Requests served with drafts and without, interrupted in the same places, and what each got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.grammars import GrammarVocabulary
from gpu.cuda.draft_model import CudaDraftModel
from gpu.cuda.speculation import SpeculativeExecutor
from gpu.kernels import KernelLoader
from gpu.runner import Runner
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drafting.sources import BatchSource
from gpu.sampling.drafting.step_times import StepTimes
from tests.kernels.serving import Server
from tests.support.plans import PlanMaker
from trioserve.model_files import open_model
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.wire import StepResult, floats, ints

__all__ = [
    "ADJUSTED",
    "NUM_TOKENS",
    "PLAIN",
    "PREFIX",
    "Drafts",
    "Output",
    "Run",
    "open_grammars",
    "serve",
    "start",
]

EOS = 2
PATTERN = "[a-f]{2,9}(, [g-k]+)*x"
PLAIN = [
    SamplerParams(temperature=0.0, logprobs=3),
    SamplerParams(
        seed=11, temperature=0.8, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        logit_bias={17: 2.0}, logprobs=0, logprob_token_ids=[5, 6],
    ),
    SamplerParams(seed=3, top_k=40, top_p=0.95, frequency_penalty=0.3),
    SamplerParams(
        temperature=0.0, speculative=False, generation_logits=True, stop_ids=range(0, 300, 5),
    ),
]  # fmt: skip
ADJUSTED = [
    SamplerParams(seed=7, stop_ids=[EOS], grammar=Grammar("regex", PATTERN), logprobs=2),
    SamplerParams(temperature=0.0, allowed_token_ids=[40, 41, 42], bad_words=[[40, 41], [42]]),
]
NUM_TOKENS = 14
MAX_DRAFTS = 3
MAX_ROWS = 8
PREEMPTED, CUT_SHORT = 5, 6
"""Tokens after which the first request is preempted and the second one closed, if any is."""
PREFIX = [(7 * place + 5) % 290 + 3 for place in range(27)]

Drafts = Callable[[Server], tuple[BatchSource, CudaDraftModel | None]]
"""Returns the drafts for a server, and the model that they are of."""


@contextmanager
def open_grammars(folder: Path) -> Iterator[GrammarCache]:
    """Open a cache with the grammars of :data:`ADJUSTED`, for the tokens of a model."""
    cache = GrammarCache(GrammarVocabulary.of(open_model(folder)))
    cache.prepare(Grammar("regex", PATTERN))
    yield cache
    cache.close()


@attrs.define
class Output:
    """All that one request got: its tokens, and what was reported of them."""

    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[str] = attrs.field(factory=list)
    """In hexadecimal digits, so that each bit counts and NaN equals itself."""
    top: list[tuple[list[int], list[float]]] = attrs.field(factory=list)
    named: list[list[float]] = attrs.field(factory=list)
    tensors: list[tuple[str, int, bytes]] = attrs.field(factory=list)

    def add(self, result: StepResult, row: int) -> None:
        """Add what ``row`` of a step gave."""
        slot = int(ints(result.slots)[row])
        own = [piece for piece in result.tensors if piece.slot == slot]
        self.tensors += [(piece.name, piece.start, piece.rows) for piece in own]
        start, stop = ints(result.offsets)[row : row + 2].tolist()
        self.tokens += ints(result.tokens)[start:stop].tolist()
        self.logprobs += [each.hex() for each in floats(result.logprobs)[start:stop].tolist()]
        for place in range(start, stop):
            a, b = ints(result.top_offsets)[place : place + 2].tolist() or (0, 0)
            if a < b:
                ids, values = ints(result.top_ids)[a:b], floats(result.top_logprobs)[a:b]
                self.top.append((ids.tolist(), values.tolist()))
            a, b = ints(result.ids_offsets)[place : place + 2].tolist() or (0, 0)
            if a < b:
                self.named.append(floats(result.ids_logprobs)[a:b].tolist())


@attrs.define
class Run:
    """Requests that are served by ``runner``, each in a slot of its own."""

    runner: Runner
    maker: PlanMaker
    params: Sequence[SamplerParams]
    adapters: Sequence[int]
    slots: dict[int, int] = attrs.field(factory=dict)
    """Request -> its slot, if it has one."""
    lengths: dict[int, int] = attrs.field(factory=dict)
    """Request -> the length of its prompt."""
    limits: dict[int, int] = attrs.field(factory=dict)
    """Request -> most tokens that it may have, if not :data:`NUM_TOKENS`."""
    outputs: list[Output] = attrs.field(init=False)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __attrs_post_init__(self) -> None:
        self.outputs = [Output() for _ in self.params]

    def open(self, request: int, slot: int, tokens: Sequence[int], **fields: Any) -> None:
        """Open a request in a slot, at first or again."""
        length = self.lengths.setdefault(request, len(tokens))
        self.slots[request] = slot
        params, adapter = self.params[request], self.adapters[request]
        self.maker.open(slot, tokens, params, prompt_length=length, adapter=adapter, **fields)

    def close(self, request: int) -> list[int]:
        """Close the slot of a request, whose pages are used again at once; return its tokens."""
        slot = self.slots.pop(request)
        known = self.maker.slots[slot]
        self.maker.close(slot)
        self.maker.free += known.pages
        return known.tokens

    def is_done(self, request: int) -> bool:
        """Return whether a request has got all the tokens that it may have."""
        tokens = self.outputs[request].tokens
        return len(tokens) >= self.limits.get(request, NUM_TOKENS) or (
            len(tokens) > 0
            and (tokens[-1] < 0 or self.params[request].is_stop(tokens[-1], len(tokens)))
        )

    def step(self, max_drafts: int) -> bool:
        """Run a step of all requests that aren't done; return whether there were any.

        Every third step has no room for drafts.
        """
        if self.num_steps % 3 == 2:
            max_drafts = 0
        rows: dict[int, int] = {}
        requests = [request for request in self.slots if not self.is_done(request)]
        for request in requests:
            known = self.maker.slots[self.slots[request]]
            missing = len(known.tokens) - known.computed
            left = self.limits.get(request, NUM_TOKENS) - len(self.outputs[request].tokens)
            decodes = missing == 1 and len(self.outputs[request].tokens) > 0
            most = 1 + max_drafts if self.params[request].speculative else 1
            rows[self.slots[request]] = min(most, left) if decodes else min(missing, 10)
        if not rows:
            return False
        result = self.runner.step(self.maker.plan(rows))
        self.maker.accept(result)
        self.num_steps += 1
        verified = ints(result.drafted)
        self.num_drafted += int(verified.sum())
        if len(verified):
            given = np.diff(ints(result.offsets))[verified > 0]
            self.num_accepted += int((given - 1).sum())
        for row, request in enumerate(requests):
            self.outputs[request].add(result, row)
            known = self.maker.slots[self.slots[request]]
            known.computed = min(known.computed, len(known.tokens) - 1)
        return True


def start(
    params: Sequence[SamplerParams],
    folder: Path,
    loader: KernelLoader,
    drafts: Drafts | None = None,
    prepare: Callable[[Server], None] = lambda server: None,
    **options: Any,
) -> Run:
    """Return a run with no request open. ``prepare`` is called when all is assembled."""
    server = Server.of(
        folder,
        loader,
        max_num_seqs=MAX_ROWS,
        drafts=drafts is not None,
        batch_invariant_attention=True,
        **options,
    )
    executor: Any = server.executor
    if drafts is not None:
        server.runner.slots.max_row_tokens = MAX_DRAFTS + 1
        source, model = drafts(server)
        times = StepTimes({1: 1.0, 2: 1.0})
        drafter = Drafter(SpeculativeConfig(adaptive=False), times, source)
        executor = SpeculativeExecutor(executor, drafter, MAX_ROWS, model)
    prepare(server)
    return Run(
        Runner(executor, server.runner.slots, max_num_batched_tokens=128),
        server.maker,
        params,
        [int("adapters" in options and request == 1) for request in range(len(params))],
    )


def serve(
    folder: Path,
    loader: KernelLoader,
    params: Sequence[SamplerParams],
    drafts: Drafts | None = None,
    *,
    interrupted: bool = False,
    **options: Any,
) -> Run:
    """Serve a request for each of ``params``; the last one's prompt is computed beside drafts.

    With ``interrupted``, the first request is preempted and goes on in another slot, the second is
    closed, and the last but one begins in its slot, with a page of the last one's prompt. Pages of
    closed slots are used again at once.
    """
    run = start(params, folder, loader, drafts, **options)
    max_drafts = 0 if drafts is None else MAX_DRAFTS
    last = len(params) - 1
    late = last - 1 if interrupted else last
    for request in range(late):
        run.open(request, request, [5 + request, 9, 17])
    run.step(max_drafts)
    run.open(last, last, PREFIX)
    interruptions = _interruptions(run, late) if interrupted else iter(())
    next(interruptions, None)
    while run.step(max_drafts):
        next(interruptions, None)
    assert all(output.tokens for output in run.outputs)
    return run


def _interruptions(run: Run, late: int) -> Iterator[None]:
    """Interrupt requests that have come far enough, and yield after each step."""
    run.limits |= {0: PREEMPTED, 1: CUT_SHORT}
    while not run.is_done(0):
        yield
    tokens = run.close(0)
    yield
    del run.limits[0]
    run.open(0, MAX_ROWS - 1, tokens)
    while not (run.is_done(1) and run.outputs[late + 1].tokens):
        yield
    slot = run.slots[1]
    run.close(1)
    pages = run.maker.slots[run.slots[late + 1]].pages[:1]
    run.open(late, slot, [*PREFIX[:16], 44, 55], shared_pages=pages)
