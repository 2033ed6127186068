"""The judge of clients' results: whether each is as expected, and each error has a reason."""

from __future__ import annotations

import math

import attrs
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
from trioserve.testing.simulation.adapters import AdapterBooks
from trioserve.testing.simulation.draw import REFUSED_GRAMMAR
from trioserve.testing.simulation.expected import (
    ExpectedOutput,
    expected_outputs,
    prompt_ids_of,
    text_of,
)
from trioserve.testing.simulation.scenario import Scenario, SimulatedClient
from trioserve.testing.simulation.trace import Violation
from trioserve.testing.simulation.watch import Books


@attrs.define(eq=False)
class Circumstances:
    """Possible reasons of an error."""

    scenario: Scenario
    books: Books
    adapters: AdapterBooks
    ended: bool = False
    """True once the scenario's end has begun: draining, abort or cancellation."""

    @property
    def failed(self) -> bool:
        """True if enough workers died that the engine may give up."""
        limit: int = self.scenario.options["max_worker_restarts"]
        never_there = self.books.num_ready == 0 and self.books.deaths > 0
        too_many = self.books.deaths_without_progress > limit and not self.scenario.is_poisoned
        return too_many or never_there


@attrs.define(eq=False)
class Visit:
    """One client's use of the engine, from its arrival to its end."""

    client: SimulatedClient
    circumstances: Circumstances
    adapter: str = ""
    """Folder of its adapter."""
    entered_at: float | None = None
    left: bool = False
    num_request_ends: int = 0
    flushed: set[int] = attrs.field(factory=set)
    """Outputs with an error that has to follow their last chunk."""
    chunks: list[list[Chunk]] = attrs.field(init=False)
    """Chunks of each output."""
    expected: list[ExpectedOutput] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.chunks = [[] for _ in range(self.client.num_outputs)]
        self._expect()

    def _expect(self) -> None:
        scenario = self.circumstances.scenario
        self.expected = expected_outputs(scenario, self.client, self.adapter)

    def compute_with(self, adapter: str) -> None:
        """Expect outputs with the adapter from this folder, "" for none."""
        self.adapter = adapter
        self._expect()

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of its prompt, with those before it in a session."""
        return prompt_ids_of(self.client)

    def go_on_from(self, prefix: list[int]) -> None:
        """Expect a turn that continues ``prefix``."""
        prompt = (*prefix, *prompt_ids_of(self.client))
        self.client = attrs.evolve(self.client, prompt=prompt)
        self._expect()

    def is_over(self, index: int) -> bool:
        """Return whether no more tokens of an output may be computed."""
        own = self.chunks[index]
        ended = bool(own) and own[-1].finish_reason is not None
        return self.left or self.num_request_ends > 0 or ended

    @property
    def num_chunks(self) -> int:
        """Number of chunks received."""
        return sum(map(len, self.chunks))

    # ---- chunks

    def take(self, chunk: Chunk) -> None:
        """Check a chunk."""
        own, expected = self.chunks[chunk.index], self.expected[chunk.index]
        self._demand(not own or own[-1].finish_reason is None, "nothing comes after the end", chunk)
        unflushed = chunk.index not in self.flushed
        self._demand(unflushed, "text is the tokens' less the stop", chunk)
        own.append(chunk)
        tokens = tuple(token for each in own for token in each.token_ids)
        text = "".join(each.text for each in own)
        self._demand(
            tokens == expected.token_ids[: len(tokens)], "tokens are those of the model", tokens
        )
        # An error comes after all held-back text, even part of a character.
        if not expected.text.startswith(text):
            self.flushed.add(chunk.index)
            flushed_well = text == text_of(tokens) and chunk.finish_reason is None
            self._demand(flushed_well, "text is the tokens' less the stop", text)
        if chunk.finish_reason is not None:
            got = (tokens, text, chunk.finish_reason, chunk.stop_reason)
            due = attrs.astuple(expected)[:4]
            self._demand(got == due, "an output ends where and as it must", f"{got}, not {due}")
        self._check_logprobs(chunk, expected, len(tokens))

    def _check_logprobs(self, chunk: Chunk, expected: ExpectedOutput, num_tokens: int) -> None:
        if self.client.params.get("logprobs") is None:
            self._demand(chunk.logprobs is None, "log-probabilities come where asked for", chunk)
            return
        entries = chunk.logprobs or ()
        first = num_tokens - len(chunk.token_ids)
        got = [(entry.token_id, entry.logprob) for entry in entries]
        due = list(zip(expected.token_ids, expected.logprobs, strict=True))[first:num_tokens]
        self._demand(got == due, "log-probabilities are the tokens'", f"{got}, not {due}")
        if self.client.params.get("logprob_token_ids"):
            asked = [tuple(logprob for _, logprob, _ in entry.asked) for entry in entries]
            wanted = list(expected.asked[first:num_tokens])
            self._demand(asked == wanted, "log-probabilities are of the ids asked for", asked)

    def check_whole(self, stream: GenerationStream) -> None:
        """Check the end of a complete stream."""
        self._demand(not self.flushed, "text is the tokens' less the stop")
        for own in self.chunks:
            finals = [chunk for chunk in own if chunk.finish_reason is not None]
            self._demand(len(finals) == 1, "each output has one final chunk", own)
        prompt = prompt_ids_of(self.client)
        self._demand(stream.prompt_token_ids == prompt, "the prompt is what was sent")
        usage = stream.usage
        counted = sum(len(chunk.token_ids) for own in self.chunks for chunk in own)
        self._demand(
            (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), counted),
            "usage is what was delivered",
            usage,
        )
        caching = self.circumstances.scenario.options["enable_prefix_caching"]
        most_cached = len(prompt) - 1 if caching else 0
        self._demand(0 <= usage.cached_tokens <= most_cached, "usage is what was cached", usage)
        if self.client.params.get("prompt_logprobs") is not None:
            found = stream.prompt_logprobs
            got = [] if found is None else [each.logprob for each in found.entries(prompt)]
            due = [
                float(fake_logprobs(prompt[:place], 256)[prompt[place]])
                for place in range(1, len(prompt))
            ]
            self._demand(got == due, "the prompt's log-probabilities are complete", got)

    # ---- ends

    def check_error(self, error: BaseException, now: float) -> None:
        """Check that the client's ``error`` has a reason."""
        client, around = self.client, self.circumstances
        reasons: dict[type[BaseException], bool] = {
            DeadlineExceeded: abs(now - self._deadline()) < 1e-6,
            QueueFull: self._may_be_refused(),
            Draining: around.ended and around.scenario.ends in ("drain", "abort"),
            RequestAborted: around.ended and around.scenario.ends == "abort",
            SlowReader: client.pause > 0 or around.scenario.worker.step_time == 0,
            AdapterNotFound: around.adapters.may_be_missed(client.number, client.adapter),
            ContextTooLong: not self._fits(),
            InvalidRequest: self._is_refused(),
            EngineError: self._may_fail(),
            EndOfChannel: False,
        }
        for kind, is_due in reasons.items():
            if isinstance(error, kind):
                self._demand(is_due, "an error has a reason", repr(error))
                return
        raise Violation("errors are trioserve's own", repr(error)) from error

    def check_left_in_time(self, now: float) -> None:
        """Check that the client left the block in time."""
        late = now - self._deadline()
        self._demand(late < 1e-6, "a deadline ends a request in any stage", f"{late:g} s late")

    def check_ends(self, outcome: str) -> None:
        """Check that the engine reported the request's end once, unless it refused the request."""
        refused = outcome in (
            *("QueueFull", "Draining", "EngineError", "InvalidRequest", "AdapterNotFound"),
        )
        fewest = 0 if refused or outcome == "ContextTooLong" else 1
        self._demand(
            fewest <= self.num_request_ends <= 1, "a request ends once", self.num_request_ends
        )

    def _deadline(self) -> float:
        """Return the end of the client's time."""
        timeout = self.client.timeout
        if timeout is None:
            timeout = self.circumstances.scenario.options.get("default_timeout")
        if timeout is None or self.entered_at is None:
            return math.inf
        return self.entered_at + timeout

    def _may_be_refused(self) -> bool:
        scenario = self.circumstances.scenario
        most: int = scenario.options["max_num_queued_reqs"]
        most_tokens: float = scenario.options.get("max_num_queued_tokens") or math.inf
        tokens = outputs = 0
        for each in scenario.clients:
            # A tenant may take half of what the others leave, so its own share counts twice.
            weight = 2 if self.client.tenant and each.tenant == self.client.tenant else 1
            num_tokens = self._most_prompt_tokens(each) + each.params["max_tokens"]
            tokens += weight * num_tokens * each.num_outputs
            outputs += weight * each.num_outputs
        return outputs > most or tokens > most_tokens

    def _most_prompt_tokens(self, client: SimulatedClient) -> int:
        if client.session is None:
            return len(prompt_ids_of(client))
        return self.circumstances.scenario.worker.max_model_len

    def _fits(self) -> bool:
        worker = self.circumstances.scenario.worker
        num_prompt = len(prompt_ids_of(self.client))
        max_tokens: int = self.client.params["max_tokens"]
        return (
            num_prompt < worker.max_model_len
            and num_prompt + max_tokens <= worker.max_model_len
            and num_prompt + max(max_tokens, 1) <= worker.fewest_pages * worker.page_size
        )

    def _is_refused(self) -> bool:
        params, worker = self.client.params, self.circumstances.scenario.worker
        grammar = params.get("grammar")
        options = self.circumstances.scenario.options
        slow = worker.call_time + worker.link_delay >= options["grammar_timeout"]
        scenario = self.circumstances.scenario
        troubled = bool(scenario.faults) or scenario.is_poisoned
        if grammar is not None and (slow or troubled or grammar.text == REFUSED_GRAMMAR):
            return True
        return not self._fits() or self._has_nothing_to_draw()

    def _has_nothing_to_draw(self) -> bool:
        return any(each.finish_reason == "error" for each in self.expected)

    def _may_fail(self) -> bool:
        around, client = self.circumstances, self.client
        worker = around.scenario.worker
        return (
            around.failed
            or (around.ended and around.scenario.ends == "cancel")
            or (client.number in around.books.may_be_blamed and self._may_be_blamed())
            or self._has_nothing_to_draw()
            or (worker.pages_after_loss is not None and not self._fits())
            or (client.params.get("grammar") is not None and around.books.deaths >= 3)
        )

    def _may_be_blamed(self) -> bool:
        """Return whether the client may be blamed: with a culprit among the clients, no
        other may.
        """
        return self.client.poisonous or not self.circumstances.scenario.is_poisoned

    def _demand(self, holds: bool, invariant: str, detail: object = "") -> None:
        if not holds:
            raise Violation(invariant, f"client {self.client.number}: {detail}")
