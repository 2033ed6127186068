"""``LLM``: handles, loops and an engine's administration from plain threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.offline.conftest import FakeModel
from trioserve import LLM, InvalidRequest, ModelLoadError, RequestAborted, SamplingParams
from trioserve.protocol.errors import EngineError

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


def wait_until(condition: Callable[[], object]) -> None:
    """Block until ``condition`` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_idle(llm: LLM) -> bool:
    statistics = llm.statistics()
    return statistics.num_streams == statistics.scheduler.pages_held == 0


def test_a_handle_has_what_generate_returns(fake_model: FakeModel) -> None:
    with LLM("fake") as llm:
        prompts = ["one", "two", "three"]
        expected = llm.generate(prompts, max_tokens=5, seed=1)
        handles = [llm.generate_async(each, max_tokens=5, seed=1) for each in prompts]
        results = [handle.result(timeout=60) for handle in handles]
        assert [each.token_ids for each in results] == [each.token_ids for each in expected]
        assert all(handle.done() for handle in handles)
        assert handles[0].result() is results[0]
        assert handles[0].request_id == results[0].request_id
        named = llm.generate_async("one", max_tokens=1, request_id="mine")
        assert named.request_id == named.result().request_id == "mine"


def test_iteration_tells_the_text_so_far_and_what_is_new(fake_model: FakeModel) -> None:
    with LLM("fake") as llm:
        handle = llm.generate_async("abc", max_tokens=6, n=2, seed=3, logprobs=1)
        parts = list(handle)
        outputs = handle.result().outputs
        for output in outputs:
            own = [part for part in parts if part.index == output.index]
            so_far = ""
            for part in own:
                so_far += part.text_diff
                assert part.text == so_far
            assert so_far == output.text
            assert sum((part.token_ids_diff for part in own), ()) == output.token_ids
            logprobs = [entry for part in own for entry in part.logprobs_diff or ()]
            assert tuple(logprobs) == output.logprobs
            assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["length"]
        assert list(handle) == parts


def test_beams_come_with_their_scores(fake_model: FakeModel) -> None:
    with LLM("fake") as llm:
        options: dict[str, Any] = {"beam_width": 3, "n": 2, "max_tokens": 5, "length_penalty": 0.0}
        (completion,) = llm.generate(["abc"], logprobs=0, **options)
        handle = llm.generate_async("abc", logprobs=0, **options)
        assert handle.result().outputs == completion.outputs
        scores = [each.cumulative_logprob for each in completion.outputs]
        assert scores == sorted(scores, reverse=True)
        for output, score in zip(completion.outputs, scores, strict=True):
            assert output.logprobs is not None
            assert sum(each.logprob for each in output.logprobs) == pytest.approx(score)


def test_several_threads_read_one_handle(fake_model: FakeModel) -> None:
    fake_model.step_time = 0.005
    with LLM("fake") as llm:
        handle = llm.generate_async("abc", max_tokens=10)
        texts: list[str] = []

        def read() -> None:
            texts.append("".join(part.text_diff for part in handle))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [handle.result().text] * 3


def test_a_timeout_ends_the_wait_alone(fake_model: FakeModel) -> None:
    fake_model.step_time = 0.02
    with LLM("fake") as llm:
        handle = llm.generate_async("abc", max_tokens=20)
        with pytest.raises(TimeoutError, match=r"after 0\.01 seconds"):
            handle.result(timeout=0.01)
        assert not handle.done()
        assert len(handle.result(timeout=60).token_ids) == 20


@pytest.mark.parametrize("way", ["cancel", "with", "collected", "break", "closed stream"])
def test_what_ends_a_request(fake_model: FakeModel, way: str) -> None:
    fake_model.step_time = 0.002
    with LLM("fake") as llm:
        if way in ("break", "closed stream"):
            stream = llm.stream("abc", **LONG)
            for _ in stream:
                break
            assert not is_idle(llm)
            if way == "break":
                del stream
            else:
                stream.close()  # type: ignore[attr-defined]
        else:
            handle = llm.generate_async("abc", **LONG)
            next(iter(handle))
            if way == "with":
                with handle:
                    pass
            elif way == "cancel":
                handle.cancel()
                handle.cancel()
            if way == "collected":
                del handle
                gc.collect()
            else:
                assert handle.done()
                with pytest.raises(RequestAborted, match="cancelled"):
                    handle.result()
                with pytest.raises(RequestAborted, match="cancelled"):
                    for _ in handle:
                        pass
        wait_until(lambda: is_idle(llm))


def test_more_than_the_queue_takes(fake_model: FakeModel) -> None:
    with LLM("fake", max_num_seqs=2, max_num_queued_reqs=3, max_num_queued_tokens=100) as llm:
        handles = [llm.generate_async([1 + index] * 30, max_tokens=2) for index in range(20)]
        assert {len(handle.result(timeout=60).token_ids) for handle in handles} == {2}


def test_errors(fake_model: FakeModel) -> None:
    with pytest.raises(ModelLoadError):
        LLM("missing")
    with LLM("fake") as llm:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            llm.generate_async("abc", max_tokens=-1).result()
        with pytest.raises(InvalidRequest, match="max_tokens"):
            next(iter(llm.stream("abc", max_tokens=-1)))
        with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
            llm.generate(["a", "b"], [SamplingParams(max_tokens=2)])
        running = llm.generate_async("abc", **LONG)
        fake_model.step_time = 0.01
    with pytest.raises(EngineError, match="closed"):
        running.result(timeout=60)
    with pytest.raises(EngineError, match="closed"):
        llm.generate_async("abc")
    with pytest.raises(EngineError, match="closed"):
        llm.statistics()
    llm.close()
    assert not fake_model.is_open


def test_a_handle_keeps_its_model(fake_model: FakeModel) -> None:
    handle = LLM("fake").generate_async("abc", max_tokens=5)
    gc.collect()
    assert len(handle.result(timeout=60).token_ids) == 5
    del handle
    gc.collect()
    wait_until(lambda: not fake_model.is_open)


def test_chats(fake_model: FakeModel) -> None:
    hello = [{"role": "user", "content": "hello"}]
    with LLM("fake") as llm:
        (one,) = llm.chat(hello, max_tokens=2, seed=1)
        (same,) = llm.generate(hello, max_tokens=2, seed=1)
        assert one.prompt_token_ids == same.prompt_token_ids
        several = llm.chat([hello, hello], max_tokens=2, seed=1)
        assert [each.token_ids for each in several] == [one.token_ids] * 2
        (bare,) = llm.chat(hello, add_generation_prompt=False, max_tokens=2)
        assert len(bare.prompt_token_ids) < len(one.prompt_token_ids)


def test_administration(fake_model: FakeModel) -> None:
    with LLM("fake") as llm:
        assert llm.list_adapters() == ()
        assert llm.weight_version() == "default"
        llm.pause("wait")
        assert llm.is_paused()
        handle = llm.generate_async("abc", max_tokens=3, request_id="held")
        wait_until(lambda: llm.statistics().scheduler.num_waiting == 1)
        llm.resume()
        assert len(handle.result(timeout=60).token_ids) == 3
        assert not llm.is_paused()
        fake_model.step_time = 0.01
        assert llm.flush_cache() >= 0
        with pytest.raises(InvalidRequest, match="enable-lora"):
            llm.load_adapter("pirate", "/nowhere")
        running = llm.generate_async("abc", request_id="named", **LONG)
        next(iter(running))
        assert llm.abort("named") == 1
        assert running.result(timeout=60).finish_reason == "abort"
