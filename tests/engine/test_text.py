"""Text on its way in and out of an engine: cuts, verdicts, stops, several outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from trioserve import (
    ContextTooLong,
    Engine,
    EngineError,
    InvalidRequest,
    SamplingParams,
    TokensPrompt,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.stream import Chunk
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine
from trioserve.text.worker_validation import MAX_WORKERS_LOST

Clock = trio.testing.MockClock
PROMPT = "hello"
GRAMMAR = Grammar("regex", "[a-z]+")


def speaker(*texts: str, **options: Any) -> Callable[[], FakeWorker]:
    """Return a worker for ``PROMPT``: output number i begins with ``texts[i]``, then dots."""
    ids = [byte_tokenizer().encode(text).ids for text in texts]
    (dot,) = byte_tokenizer().encode(".").ids

    def token(context: list[int], sampler: SamplerParams) -> int:
        place = len(context) - len(PROMPT)
        output = ids[sampler.sequence_index]
        return output[place] if place < len(output) else dot

    return lambda: FakeWorker(token=token, **options)


async def settle(engine: Engine) -> None:
    """Let what was left behind be worked off, then demand that nothing is."""
    await trio.sleep(60)
    engine.check_integrity()
    statistics = engine.statistics()
    assert statistics.num_streams == statistics.num_tokenizing == statistics.stream_bytes == 0
    scheduler = statistics.scheduler
    assert scheduler.num_running == scheduler.num_waiting == scheduler.pages_held == 0


# ---- cuts


async def test_prompts_are_cut_to_the_tokens_asked_for(autojump_clock: Clock) -> None:
    async with open_fake_engine(lambda: FakeWorker(max_model_len=64)) as engine:
        text = "".join(map(chr, range(33, 127)))
        ids = tuple(engine.tokenizer.encode(text))

        async def seen(prompt: Any, **params: Any) -> tuple[int, ...]:
            completion = await engine.complete(prompt, seed=1, **{"max_tokens": 4, **params})
            assert completion.usage.prompt_tokens == len(completion.prompt_token_ids)
            return completion.prompt_token_ids

        for prompt in (text, TokensPrompt(ids)):
            assert await seen(prompt, truncate_prompt_tokens=5) == ids[-5:]
            assert await seen(prompt, truncate_prompt_tokens=5, truncation_side="right") == ids[:5]
            assert await seen(prompt, truncate_prompt_tokens=-1) == ids[-60:]
            assert await seen(prompt, truncate_prompt_tokens=-1, max_tokens=0) == ids[-63:]
            assert await seen(prompt, truncate_prompt_tokens=-1, max_tokens=None) == ids[-63:]
        assert await seen("short", truncate_prompt_tokens=50) == tuple(
            engine.tokenizer.encode("short")
        )
        chat = [{"role": "user", "content": text}]
        rendered = tuple(engine.tokenizer.encode(f"user: {text}\nassistant:"))
        assert await seen(chat, truncate_prompt_tokens=20) == rendered[-20:]
        await settle(engine)


async def test_a_prompt_that_is_cut_is_not_refused_for_its_length(autojump_clock: Clock) -> None:
    async with open_fake_engine(lambda: FakeWorker(max_model_len=64)) as engine:
        endless = "x" * 1_000_000
        with pytest.raises(ContextTooLong):
            await engine.complete(endless, max_tokens=1)
        cut = await engine.complete(endless, max_tokens=1, truncate_prompt_tokens=-1)
        assert cut.usage.prompt_tokens == 63
        # What is kept has to fit as anything else has.
        with pytest.raises(ContextTooLong):
            await engine.complete(endless, max_tokens=1, truncate_prompt_tokens=64)
        with pytest.raises(ContextTooLong) as caught:
            await engine.complete(endless, max_tokens=64, truncate_prompt_tokens=-1)
        assert caught.value.param == "max_tokens"
        await settle(engine)


async def test_a_prompt_with_an_image_is_not_cut(autojump_clock: Clock) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    async with open_fake_engine(FakeWorker) as engine:
        chat = [{"role": "user", "content": [part]}]
        with pytest.raises(InvalidRequest, match="isn't served in a prompt with images") as refused:
            await engine.complete(chat, max_tokens=1, truncate_prompt_tokens=-1)
        assert refused.value.param == "truncate_prompt_tokens"
        await settle(engine)


# ---- verdicts


async def test_a_grammar_that_the_worker_refuses_is_the_caller_s_error(
    autojump_clock: Clock,
) -> None:
    asked: list[Any] = []

    def prepare(arguments: Any) -> Any:
        asked.append(arguments)
        if arguments["grammar"] == ["regex", "("]:
            return {"error": "the regex isn't closed", "param": "grammar"}
        if arguments["extra_args"].get("strength", 0) > 1:
            return {"error": "strength must be at most 1", "param": "extra_args"}
        return None

    async with open_fake_engine(
        lambda: FakeWorker(calls={"prepare": prepare}), logits_processors=["some:Processor"]
    ) as engine:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="isn't closed") as caught:
                await engine.complete(PROMPT, max_tokens=1, grammar=Grammar("regex", "("))
            assert caught.value.param == "grammar"
        with pytest.raises(InvalidRequest, match="strength must be at most 1") as caught:
            await engine.complete(PROMPT, max_tokens=1, extra_args={"strength": 2})
        assert caught.value.param == "extra_args"
        await engine.complete(PROMPT, max_tokens=1, grammar=GRAMMAR, extra_args={"strength": 1})
        assert len(asked) == 3
        await settle(engine)


async def test_steps_go_on_while_a_grammar_is_compiled(autojump_clock: Clock) -> None:
    calls: list[Any] = []

    def make() -> FakeWorker:
        return FakeWorker(step_time=0.1, call_time=5, calls={"prepare": calls.append})

    async with open_fake_engine(make) as engine:
        ended: list[tuple[str, float]] = []

        async def complete(name: str, **params: Any) -> None:
            await engine.complete(PROMPT, max_tokens=10, **params)
            ended.append((name, trio.current_time()))

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(lambda: complete("constrained", grammar=GRAMMAR))
            await trio.lowlevel.checkpoint()
            nursery.start_soon(complete, "free")
        assert ended[0][0] == "free"
        assert ended[0][1] - started < 2
        assert len(ended) == 101
        # All hundred waited for the same call, then ran in two crowds of up to 64.
        assert calls == [{"grammar": ["regex", "[a-z]+"], "extra_args": {}}]
        assert max(time for _, time in ended) - started < 5 + 3
        await settle(engine)


async def test_compiling_for_too_long_is_the_request_s_error(autojump_clock: Clock) -> None:
    async with open_fake_engine(lambda: FakeWorker(call_time=50), grammar_timeout=3) as engine:
        started = trio.current_time()
        with pytest.raises(InvalidRequest, match="longer than 3 s") as caught:
            await engine.complete(PROMPT, max_tokens=1, grammar=GRAMMAR)
        assert caught.value.param == "grammar"
        assert trio.current_time() - started == pytest.approx(3)
        assert (await engine.complete(PROMPT, max_tokens=1)).usage.completion_tokens == 1
        await settle(engine)


async def test_a_worker_that_dies_while_it_compiles_delays_the_request(
    autojump_clock: Clock,
) -> None:
    workers: list[FakeWorker] = []

    def make() -> FakeWorker:
        def die_in_the_first(step: int, plan: wire.Plan) -> None:
            if len(workers) == 1 and step == 5:
                raise WorkerDies

        workers.append(FakeWorker(step_time=0.1, call_time=2, script=die_in_the_first))
        return workers[-1]

    async with open_fake_engine(make) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: engine.complete(PROMPT, max_tokens=30))
            completion = await engine.complete(PROMPT, max_tokens=3, grammar=GRAMMAR)
        assert completion.usage.completion_tokens == 3
        assert len(workers) == 2
        await settle(engine)


async def test_between_two_workers_there_is_none_to_call(autojump_clock: Clock) -> None:
    workers: list[FakeWorker] = []

    def make() -> FakeWorker:
        def die_in_the_first(step: int, plan: wire.Plan) -> None:
            if len(workers) == 1 and step == 5:
                raise WorkerDies

        workers.append(FakeWorker(step_time=0.1, script=die_in_the_first))
        return workers[-1]

    async with open_fake_engine(make) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: engine.complete(PROMPT, max_tokens=30))
        with trio.fail_after(10):
            while engine.healthy:
                await trio.sleep(0.01)
        with pytest.raises(WorkerLost, match="there is no worker to call 'prepare'"):
            await engine.call_worker("prepare")
        with trio.fail_after(10):
            while not engine.healthy:
                await trio.sleep(0.01)
        assert await engine.call_worker("prepare") is None


async def test_a_grammar_that_ends_workers_does_not_end_the_engine(autojump_clock: Clock) -> None:
    deaths = 0

    def prepare(_: Any) -> Any:
        nonlocal deaths
        deaths += 1
        raise WorkerDies

    class Fragile(FakeWorker):
        def answer(self, call: wire.Call) -> wire.Reply:
            return super().answer(call) if call.name != "prepare" else prepare(call)

    async with open_fake_engine(Fragile) as engine:
        with pytest.raises(EngineError, match="was lost 3 times while it prepared"):
            await engine.complete(PROMPT, max_tokens=1, grammar=GRAMMAR)
        assert deaths == 1 + MAX_WORKERS_LOST
        assert (await engine.complete(PROMPT, max_tokens=1)).usage.completion_tokens == 1
        await settle(engine)


@pytest.mark.parametrize("after", [0.0, 0.5, 1.5, 2.5])
async def test_a_caller_that_leaves_before_the_verdict_leaves_nothing(
    autojump_clock: Clock, after: float
) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.1, call_time=2)) as engine:
        with trio.move_on_after(after):
            async with engine.generate(PROMPT, max_tokens=50, grammar=GRAMMAR) as stream:
                async for _ in stream:
                    pass
        await settle(engine)
        steps = engine.statistics().scheduler.num_steps
        assert (steps > 0) == (after > 2)


# ---- stops


async def test_a_stop_regex_ends_an_output(autojump_clock: Clock) -> None:
    async with open_fake_engine(speaker("One.\n\nUser: two", step_time=0.1)) as engine:
        params = SamplingParams(max_tokens=50, stop_regex=[r"\n+\w+:"])
        completion = await engine.complete(PROMPT, params)
        assert completion.text == "One."
        assert (completion.finish_reason, completion.stop_reason) == ("stop", r"\n+\w+:")
        assert completion.usage.completion_tokens == len("One.\n\nUser:")
        included = await engine.complete(
            PROMPT, max_tokens=50, stop_regex=r"\n+\w+:", include_stop_str_in_output=True
        )
        assert included.text == "One.\n\nUser:"
        steps = engine.statistics().scheduler.num_steps
        await settle(engine)
        assert engine.statistics().scheduler.num_steps <= steps + 2


async def test_a_bad_stop_regex_is_refused_before_anything_runs(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="no valid regex") as caught:
            engine.generate(PROMPT, max_tokens=1, stop_regex="(")
        assert caught.value.param == "stop_regex"
        await settle(engine)


async def test_a_stop_regex_that_takes_for_ever_ends_its_own_request_only(
    autojump_clock: Clock,
) -> None:
    async with open_fake_engine(speaker("a" * 480 + "c")) as engine:
        results: list[str] = []

        async def hostile() -> None:
            with pytest.raises(InvalidRequest, match="takes too long") as caught:
                await engine.complete(PROMPT, max_tokens=481, n=1, stop_regex="[ab].{400}c")
            assert caught.value.param == "stop_regex"
            results.append("refused")

        async def friendly() -> None:
            results.append((await engine.complete(PROMPT, max_tokens=481)).text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hostile)
            nursery.start_soon(friendly)
        assert sorted(results) == ["a" * 480 + "c", "refused"]
        await settle(engine)


# ---- several outputs


async def test_outputs_end_one_by_one_each_by_its_own_stop(autojump_clock: Clock) -> None:
    worker = speaker("ab!", "abcdef?gh", "x\nyz", step_time=0.1)
    async with open_fake_engine(worker) as engine:
        chunks: list[Chunk] = []
        params = SamplingParams(n=3, max_tokens=8, stop=["!"], stop_regex=[r"\s\w"])
        async with engine.generate(PROMPT, params) as stream:
            async for chunk in stream:
                chunks.append(chunk)
            usage = stream.usage
        texts = ["".join(c.text for c in chunks if c.index == index) for index in range(3)]
        assert texts == ["ab", "abcdef?g", "x"]
        finals = [
            (c.index, c.finish_reason, c.stop_reason) for c in chunks if c.finish_reason is not None
        ]
        assert finals == [(0, "stop", "!"), (2, "stop", r"\s\w"), (1, "length", None)]
        for index, _, _ in finals:
            own = [c for c in chunks if c.index == index]
            assert own[-1].finish_reason is not None
        assert usage.completion_tokens == 3 + 8 + 3
        assert usage.completion_tokens == sum(len(c.token_ids) for c in chunks)
        assert usage.prompt_tokens == len(PROMPT)
        await settle(engine)


async def test_an_error_of_one_output_is_the_request_s(autojump_clock: Clock) -> None:
    async with open_fake_engine(speaker("b" * 499, "a" * 480 + "c", step_time=0.1)) as engine:
        with pytest.raises(InvalidRequest, match="takes too long"):
            await engine.complete(PROMPT, n=2, max_tokens=500, stop_regex="(?:[ab].{400}|b{9}x)c")
        await settle(engine)
        assert engine.statistics().scheduler.num_steps < 450


async def test_every_logprob_has_its_text(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        ids = engine.tokenizer.encode("xy")
        completion = await engine.complete(
            PROMPT,
            max_tokens=3,
            logprobs=1,
            prompt_logprobs=1,
            logprob_token_ids=ids,
            seed=1,
        )
        assert completion.logprobs is not None
        assert completion.prompt_logprobs is not None
        prompt = completion.prompt_logprobs.entries(list(completion.prompt_token_ids))
        entries = [*completion.logprobs, *map(engine.tokenizer.with_texts, prompt)]
        assert len(entries) == 3 + len(PROMPT) - 1
        for entry in entries:
            assert entry.text == engine.tokenizer.token_text(entry.token_id) != ""
            assert [text for _, _, text in entry.asked] == ["x", "y"]
            assert all(text == engine.tokenizer.token_text(id) for id, _, text in entry.top)
        assert "".join(entry.text for entry in entries[3:]) == PROMPT[1:]
