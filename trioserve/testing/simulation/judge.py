"""Checks of clients' results: each must be as expected, and each error must have a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
from trio import EndOfChannel

from trioserve.protocol.errors import (
    AdapterNotFound,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    SlowReader,
)
from trioserve.requests.generation import GenerationStream
from trioserve.requests.stream import Chunk
from trioserve.testing.fake_model import fake_logprobs
from trioserve.testing.fake_reports import fake_state
from trioserve.testing.simulation.adapters import AdapterChecker
from trioserve.testing.simulation.cluster import ClusterChecker
from trioserve.testing.simulation.draw import REFUSED_GRAMMAR
from trioserve.testing.simulation.expected import (
    ExpectedOutput,
    expected_outputs,
    prompt_ids_of,
    text_of,
)
from trioserve.testing.simulation.scenario import Scenario, SimulatedClient
from trioserve.testing.simulation.trace import Violation

Row = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""Function that returns the row of an output tensor behind some tokens."""


def fake_logits(context: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the fake logits [256] behind ``context``."""
    return fake_logprobs(context, 256)


@attrs.define(eq=False)
class RunState:
    """The state of the run that can explain a client's error."""

    scenario: Scenario
    checkers: ClusterChecker
    adapters: AdapterChecker
    ended: bool = False
    """True once the scenario's end has begun: draining, abort or cancellation."""

    @property
    def failed(self) -> bool:
        """True if so many workers died that the engine may fail."""
        return self.checkers.engine_may_fail


@attrs.define(eq=False)
class Visit:
    """One client's use of the engine, from its arrival to its end."""

    client: SimulatedClient
    run_state: RunState
    adapter: str = ""
    """Folder of its adapter."""
    entered_at: float | None = None
    left: bool = False
    num_request_ends: int = 0
    flushed: set[int] = attrs.field(factory=set)
    """Outputs that gave all their text early, so an error must come next."""
    chunks: list[list[Chunk]] = attrs.field(init=False)
    """Chunks of each output."""
    expected: list[ExpectedOutput] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.chunks = [[] for _ in range(self.client.num_outputs)]
        self._expect()

    def _expect(self) -> None:
        scenario = self.run_state.scenario
        self.expected = expected_outputs(scenario, self.client, self.adapter)

    def expect_adapter(self, adapter: str) -> None:
        """Expect outputs with the adapter from this folder, "" for none."""
        self.adapter = adapter
        self._expect()

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of its prompt, with those before it in a session."""
        return prompt_ids_of(self.client)

    def continue_from(self, prefix: list[int]) -> None:
        """Expect a turn that continues ``prefix``."""
        prompt = (*prefix, *prompt_ids_of(self.client))
        self.client = attrs.evolve(self.client, prompt=prompt)
        self._expect()

    def is_over(self, index: int) -> bool:
        """Return True if no more tokens of the output may be computed."""
        if index >= len(self.chunks):  # a beam that is no output
            return all(map(self.is_over, range(len(self.chunks))))
        own = self.chunks[index]
        ended = bool(own) and own[-1].finish_reason is not None
        return self.left or self.num_request_ends > 0 or ended

    @property
    def num_waiting_for_grammar(self) -> int:
        """Most outputs that may wait until the worker has compiled the request's grammar."""
        if self.entered_at is None or self.client.params.get("grammar") is None:
            return 0
        return sum(not self.is_over(index) for index in range(self.client.num_sequences))

    @property
    def num_chunks(self) -> int:
        """Number of chunks received."""
        return sum(map(len, self.chunks))

    # ---- chunks

    def take(self, chunk: Chunk) -> None:
        """Check that ``chunk`` continues its output as expected."""
        own, expected = self.chunks[chunk.index], self.expected[chunk.index]
        self._require(
            not own or own[-1].finish_reason is None, "nothing comes after the end", chunk
        )
        unflushed = chunk.index not in self.flushed
        self._require(unflushed, "text is the tokens' less the stop", chunk)
        own.append(chunk)
        tokens = tuple(token for each in own for token in each.token_ids)
        text = "".join(each.text for each in own)
        self._require(
            tokens == expected.token_ids[: len(tokens)], "tokens are those of the model", tokens
        )
        # Before an error all held-back text is delivered, even part of a character.
        if not expected.text.startswith(text):
            self.flushed.add(chunk.index)
            flushed_well = text == text_of(tokens) and chunk.finish_reason is None
            self._require(flushed_well, "text is the tokens' less the stop", text)
        if chunk.finish_reason is not None:
            got = (tokens, text, chunk.finish_reason, chunk.stop_reason)
            due = attrs.astuple(expected)[:4]
            self._require(got == due, "an output ends where and as it must", f"{got}, not {due}")
        self._check_logprobs(chunk, expected, len(tokens))

    def _check_logprobs(self, chunk: Chunk, expected: ExpectedOutput, num_tokens: int) -> None:
        if self.client.params.get("logprobs") is None:
            self._require(chunk.logprobs is None, "log-probabilities come where asked for", chunk)
            return
        entries = chunk.logprobs or ()
        first = num_tokens - len(chunk.token_ids)
        got = [(entry.token_id, entry.logprob) for entry in entries]
        due = list(zip(expected.token_ids, expected.logprobs, strict=True))[first:num_tokens]
        self._require(got == due, "log-probabilities are the tokens'", f"{got}, not {due}")
        if self.client.params.get("logprob_token_ids"):
            asked = [tuple(logprob for _, logprob, _ in entry.asked) for entry in entries]
            wanted = list(expected.asked[first:num_tokens])
            self._require(asked == wanted, "log-probabilities are of the ids asked for", asked)

    def check_whole(self, stream: GenerationStream) -> None:
        """Check a stream that was read to its end."""
        self._require(not self.flushed, "text is the tokens' less the stop")
        for own in self.chunks:
            finals = [chunk for chunk in own if chunk.finish_reason is not None]
            self._require(len(finals) == 1, "each output has one final chunk", own)
        prompt = prompt_ids_of(self.client)
        self._require(stream.prompt_token_ids == prompt, "the prompt is what was sent")
        usage = stream.usage
        counted = sum(len(chunk.token_ids) for own in self.chunks for chunk in own)
        self._require(
            (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), counted),
            "usage is what was delivered",
            usage,
        )
        caching = self.run_state.scenario.options["enable_prefix_caching"]
        most_cached = len(prompt) - 1 if caching else 0
        self._require(0 <= usage.cached_tokens <= most_cached, "usage is what was cached", usage)
        if self.client.params.get("prompt_logprobs") is not None:
            found = stream.prompt_logprobs
            got = [] if found is None else [each.logprob for each in found.entries(prompt)]
            due = [
                float(fake_logprobs(prompt[:place], 256)[prompt[place]])
                for place in range(1, len(prompt))
            ]
            self._require(got == due, "the prompt's log-probabilities are complete", got)
        self._check_tensors(stream, prompt)

    def _check_tensors(self, stream: GenerationStream, prompt: list[int]) -> None:
        """Check that each row of hidden states and logits is there once, and is its token's."""
        params = self.client.params
        for index, own in enumerate(self.chunks):
            tokens = [*prompt, *(token for chunk in own for token in chunk.token_ids)]
            num_output, first = len(tokens) - len(prompt), len(prompt) - 1
            due: dict[str, tuple[Row, int, int]] = {}
            if params.get("return_hidden_states"):
                due["hidden_states"] = (fake_state, first, first + max(num_output, index == 0))
            if params.get("return_hidden_states") == "all":
                due["prompt_hidden_states"] = (fake_state, 0, len(prompt))
            if params.get("return_context_logits"):
                due["context_logits"] = (fake_logits, 0, len(prompt))
            if params.get("return_generation_logits"):
                due["generation_logits"] = (fake_logits, first, first + num_output)
            got = {**stream.prompt_tensors, **stream.output_tensors(index, num_output)}
            self._require(got.keys() == due.keys(), "the arrays are those asked for", got.keys())
            for name, (row, start, stop) in due.items():
                rows = [row(tokens[: place + 1]).tolist() for place in range(start, stop)]
                self._require(got[name].tolist() == rows, "each row comes once", (name, index))

    # ---- ends

    def check_error(self, error: BaseException, now: float) -> None:
        """Check that the client's ``error`` has a reason."""
        client, run_state = self.client, self.run_state
        reasons: dict[type[BaseException], bool] = {
            DeadlineExceeded: abs(now - self._deadline()) < 1e-6,
            QueueFull: self._may_be_refused(),
            Draining: run_state.ended and run_state.scenario.ends in ("drain", "abort"),
            RequestAborted: run_state.ended and run_state.scenario.ends == "abort",
            SlowReader: client.pause > 0 or run_state.scenario.worker.step_time == 0,
            AdapterNotFound: run_state.adapters.may_be_missing(client.number, client.adapter),
            ContextTooLong: not self._fits(),
            InvalidRequest: self._is_refused(),
            EngineError: self._may_fail(),
            EndOfChannel: False,
        }
        for kind, is_due in reasons.items():
            if isinstance(error, kind):
                self._require(is_due, "an error has a reason", repr(error))
                return
        raise Violation("errors are trioserve's own", repr(error)) from error

    def check_left_in_time(self, now: float) -> None:
        """Check that the client left the block in time."""
        late = now - self._deadline()
        self._require(late < 1e-6, "a deadline ends a request in any stage", f"{late:g} s late")

    def check_ends(self, outcome: str) -> None:
        """Check that the engine reported the request's end once, unless it refused the request."""
        refused = outcome in (
            *("QueueFull", "Draining", "EngineError", "InvalidRequest", "AdapterNotFound"),
        )
        fewest = 0 if refused or outcome == "ContextTooLong" else 1
        self._require(
            fewest <= self.num_request_ends <= 1, "a request ends once", self.num_request_ends
        )

    def _deadline(self) -> float:
        """Return the time of the client's deadline; infinity for none."""
        timeout = self.client.timeout
        if timeout is None:
            timeout = self.run_state.scenario.options.get("default_timeout")
        if timeout is None or self.entered_at is None:
            return math.inf
        return self.entered_at + timeout

    def _may_be_refused(self) -> bool:
        scenario = self.run_state.scenario
        most: int = scenario.options["max_num_queued_reqs"]
        most_tokens: float = scenario.options.get("max_num_queued_tokens") or math.inf
        tokens = outputs = 0
        for each in scenario.clients:
            # A tenant may take half of what the others leave, so its own share counts twice.
            weight = 2 if self.client.tenant and each.tenant == self.client.tenant else 1
            num_tokens = self._most_prompt_tokens(each) + each.params["max_tokens"]
            tokens += weight * num_tokens * each.num_sequences
            outputs += weight * each.num_sequences
        return outputs > most or tokens > most_tokens

    def _most_prompt_tokens(self, client: SimulatedClient) -> int:
        if client.session is None:
            return len(prompt_ids_of(client))
        return self.run_state.scenario.worker.max_model_len

    def _fits(self) -> bool:
        worker = self.run_state.scenario.worker
        num_prompt = len(prompt_ids_of(self.client))
        max_tokens: int = self.client.params["max_tokens"]
        width = max(self.client.beam_width, 1)
        shared = num_prompt // worker.page_size if width > 1 else 0
        pages = shared + max(worker.fewest_pages - shared, 0) // width
        return (
            num_prompt < worker.max_model_len
            and num_prompt + max_tokens <= worker.max_model_len
            and num_prompt + max(max_tokens, 1) <= pages * worker.page_size
        )

    def _is_refused(self) -> bool:
        params, worker = self.client.params, self.run_state.scenario.worker
        grammar = params.get("grammar")
        options = self.run_state.scenario.options
        scenario = self.run_state.scenario
        link_delay = worker.link_delay + 2 * max(each.link_delay for each in scenario.members)
        slow = worker.call_time + link_delay >= options["grammar_timeout"]
        troubled = bool(scenario.faults) or scenario.is_poisoned
        if grammar is not None and (slow or troubled or grammar.text == REFUSED_GRAMMAR):
            return True
        most_beams = min(options["max_num_seqs"], worker.max_num_batched_tokens)
        too_many = self.client.beam_width > most_beams
        return too_many or not self._fits() or self._has_nothing_to_draw()

    def _has_nothing_to_draw(self) -> bool:
        return any(each.finish_reason == "error" for each in self.expected)

    def _may_fail(self) -> bool:
        run_state, client = self.run_state, self.client
        worker = run_state.scenario.worker
        return (
            run_state.failed
            or (run_state.ended and run_state.scenario.ends == "cancel")
            or (
                client.number in run_state.checkers.places.possible_culprits
                and self._may_be_culprit()
            )
            or run_state.checkers.was_on_a_worker_given_up(client.number)
            or self._has_nothing_to_draw()
            or (worker.pages_after_loss is not None and not self._fits())
            or (client.params.get("grammar") is not None and run_state.checkers.losses >= 3)
        )

    def _may_be_culprit(self) -> bool:
        """Return True if the client may fail as the culprit.

        If one of the clients is poisonous, no other may.
        """
        return self.client.poisonous or not self.run_state.scenario.is_poisoned

    def _require(self, holds: bool, invariant: str, detail: object = "") -> None:
        if not holds:
            raise Violation(invariant, f"client {self.client.number}: {detail}")
