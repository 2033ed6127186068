"""Outputs without text: a request's ``detokenize``, and a server without a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import assert_idle, open_compiled_engine
from tests.support.http_stub import server_config
from tests.support.tiny_models import make_tiny
from trioserve import InvalidRequest, SamplingParams
from trioserve.http import create_app

PROMPT = [3, 4, 5, 6]
OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm2", tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def bare(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model without the files of its tokenizer."""
    copy = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(folder, copy, ignore=lambda _, names: [n for n in names if "token" in n])
    return copy


async def test_a_request_without_text(folder: Path) -> None:
    async with open_compiled_engine(folder) as engine:
        whole = await engine.complete(PROMPT, logprobs=1, **OPTIONS)
        assert whole.text
        ids = await engine.complete(PROMPT, logprobs=1, detokenize=False, **OPTIONS)
        assert (ids.text, ids.token_ids) == ("", whole.token_ids)
        assert ids.logprobs is not None
        assert whole.logprobs is not None
        assert [each.logprob for each in ids.logprobs] == [each.logprob for each in whole.logprobs]
        assert {each.text for each in ids.logprobs} == {""}
        assert ids.cumulative_logprob == pytest.approx(sum(each.logprob for each in ids.logprobs))
        assert (await engine.complete(PROMPT, **OPTIONS)).cumulative_logprob is None
        await assert_idle(engine)
    for field in ("stop", "stop_regex"):
        with pytest.raises(InvalidRequest, match="without detokenize") as caught:
            SamplingParams(detokenize=False, **{field: "x"})  # type: ignore[arg-type]
        assert caught.value.param == field


async def test_a_server_without_a_tokenizer(folder: Path, bare: Path) -> None:
    async with open_compiled_engine(folder) as engine:
        whole = await engine.complete(PROMPT, **OPTIONS)
    async with open_compiled_engine(bare, skip_tokenizer_init=True) as engine:
        ids = await engine.complete(PROMPT, **OPTIONS)
        assert (ids.text, ids.token_ids) == ("", whole.token_ids)
        for prompt, options, param in (
            ("text", {}, "prompt"),
            ([{"role": "user", "content": "Hi"}], {}, "messages"),
            (PROMPT, {"stop": "x"}, "stop"),
            (PROMPT, {"bad_words": ["x"]}, "bad_words"),
        ):
            with pytest.raises(InvalidRequest, match="--skip-tokenizer-init") as caught:
                await engine.complete(prompt, **options)  # type: ignore[arg-type]
            assert caught.value.param == param
        await assert_idle(engine)


async def test_over_http(bare: Path) -> None:
    async with open_compiled_engine(bare, skip_tokenizer_init=True) as engine:
        client = create_app(engine, server_config()).test_client()

        async def post(path: str, **body: Any) -> tuple[int, Any]:
            response = await client.post(path, json=body)
            return response.status_code, json.loads(await response.get_data(True))

        status, reply = await post(
            "/generate",
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        )
        assert (status, reply["text"], len(reply["output_ids"])) == (200, "", 4)
        status, reply = await post(
            "/v1/completions",
            prompt=PROMPT,
            max_tokens=4,
            ignore_eos=True,
            logprobs=1,
            echo=True,
            return_token_ids=True,
        )
        assert status == 200, reply
        (choice,) = reply["choices"]
        assert (choice["text"], len(choice["token_ids"])) == ("", 4)
        assert choice["logprobs"]["tokens"][0] == "token_id:3"
        for path, body, param in (
            ("/generate", {"text": "x"}, "text"),
            ("/v1/completions", {"prompt": "x"}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ("/tokenize", {"prompt": "x"}, "prompt"),
            ("/detokenize", {"tokens": [3]}, "tokens"),
        ):
            status, reply = await post(path, **body)
            assert (status, reply["error"]["param"]) == (400, param), path
            assert "--skip-tokenizer-init" in reply["error"]["message"]
