"""Programs with litellm: through OpenAI's dialect, and through the others."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import pytest
from asked_server import KEY, MODEL, URL, wait_until_idle
from pydantic import BaseModel

# Prices of models would be fetched from the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

PLACE: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY}
GREEDY = {"temperature": 0, "max_tokens": 40}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PLACES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    # Not by additionalProperties, which it leaves out for some servers.
    "maxProperties": 2,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": PLACES,
    },
}
DIALECTS: dict[str, dict[str, Any]] = {
    f"openai/{MODEL}": PLACE,
    f"hosted_vllm/{MODEL}": PLACE,
    f"anthropic/{MODEL}": {"api_base": URL, "api_key": KEY},
    f"ollama_chat/{MODEL}": {"api_base": URL, "api_key": KEY},
}
"""The names of models that make litellm speak one dialect or another."""


class City(BaseModel):
    name: Literal["Paris", "London"]
    large: bool


def chat(**options: Any) -> Any:
    options = {"model": f"openai/{MODEL}", "messages": CAPITAL, **PLACE, **GREEDY, **options}
    return litellm.completion(**options)


@pytest.mark.parametrize("model", DIALECTS)
def test_an_answer_and_the_same_answer_streamed(model: str) -> None:
    whole = chat(model=model, **DIALECTS[model])
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = chat(
        model=model, stream=True, stream_options={"include_usage": True}, **DIALECTS[model]
    )
    streamed = litellm.stream_chunk_builder(list(stream), messages=CAPITAL)
    assert streamed is not None
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


def test_the_asynchronous_half() -> None:
    async def ask() -> tuple[str, str]:
        options: dict[str, Any] = {"model": f"openai/{MODEL}", "messages": CAPITAL}
        whole = await litellm.acompletion(**options, **PLACE, **GREEDY)
        stream = await litellm.acompletion(**options, **PLACE, **GREEDY, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
    assert whole


def test_sampling_stop_and_several_choices() -> None:
    drawn = chat(temperature=0.9, n=3, max_tokens=8, top_p=0.9, seed=7, extra_body={"top_k": 20})
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]
    text = chat().choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    (stopped,) = chat(stop=[stop]).choices
    assert (stopped.message.content, stopped.finish_reason) == (text.partition(stop)[0], "stop")


def test_log_probabilities() -> None:
    entries = chat(logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize("model", [model for model in DIALECTS if "ollama" not in model])
def test_a_tool_that_has_to_be_called(model: str) -> None:
    """Ollama's API has no way to say that one has to be."""
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {
        **{"model": model, "messages": asked, "tools": [WEATHER], "max_tokens": 80},
        **{"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        **DIALECTS[model],
    }
    (choice,) = chat(**options).choices
    (call,) = choice.message.tool_calls
    streamed = litellm.stream_chunk_builder(list(chat(**options, stream=True)))
    assert streamed is not None
    (same,) = streamed.choices[0].message.tool_calls
    assert same.function.name == call.function.name == "weather"
    if not model.startswith("anthropic"):  # to which litellm doesn't tell how much there may be
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
        assert same.function.arguments == call.function.arguments

    asked += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    answer = chat(**{**options, "tool_choice": "none"}).choices[0].message
    assert answer.content


@pytest.mark.parametrize("model", DIALECTS)
def test_an_answer_of_a_form(model: str) -> None:
    answer = chat(model=model, response_format=City, **DIALECTS[model])
    City.model_validate_json(answer.choices[0].message.content)


def test_any_object() -> None:
    answer = chat(response_format={"type": "json_object"}, max_tokens=10)
    assert answer.choices[0].message.content.startswith("{")


def test_a_completion_and_the_same_completion_streamed() -> None:
    options: dict[str, Any] = {"model": f"text-completion-openai/{MODEL}", **PLACE, **GREEDY}
    whole = litellm.text_completion(**options, prompt="The capital of France is")
    pieces = litellm.text_completion(**options, prompt="The capital of France is", stream=True)
    assert whole.choices[0].text
    assert "".join(piece.choices[0].text or "" for piece in pieces) == whole.choices[0].text


def test_responses_and_messages() -> None:
    response = litellm.responses(
        model=f"openai/{MODEL}", input="My name is Ada.", max_output_tokens=20, **PLACE
    )
    assert response.output[0].content[0].text
    events = litellm.responses(
        **{"model": f"openai/{MODEL}", "input": "What is my name?", "stream": True, **PLACE},
        **{"previous_response_id": response.id, "max_output_tokens": 20},
    )
    assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")

    async def message() -> Any:
        return await litellm.anthropic.messages.acreate(
            **{"model": f"anthropic/{MODEL}", "messages": CAPITAL, "max_tokens": 8},
            **DIALECTS[f"anthropic/{MODEL}"],
        )

    assert asyncio.run(message())["content"][0]["text"]


def test_embeddings() -> None:
    reply = litellm.embedding(model=f"openai/{MODEL}", input=["a cat", "a dog"], **PLACE)
    one, other = (each["embedding"] for each in reply.data)
    assert len(one) == len(other)


def test_the_models_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{URL}/v1")
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_key=KEY, api_base=URL
    )
    assert found == [f"openai/{MODEL}"] or found == [MODEL]


def test_a_router_that_falls_back() -> None:
    def deployment(group: str, name: str) -> dict[str, Any]:
        return {"model_name": group, "litellm_params": {"model": f"openai/{name}", **PLACE}}

    router = litellm.Router(
        model_list=[deployment("first", "no-such-model"), deployment("second", MODEL)],
        fallbacks=[{"first": ["second"]}],
        num_retries=0,
    )
    answer = router.completion(model="first", messages=CAPITAL, **GREEDY)
    assert answer.model == MODEL
    assert answer.choices[0].message.content


@pytest.mark.parametrize("model", DIALECTS)
def test_errors_are_those_that_the_client_knows(model: str) -> None:
    place = DIALECTS[model]
    kind = model.split("/")[0]
    with pytest.raises(litellm.NotFoundError, match="gpt-4"):
        chat(**{**place, "model": f"{kind}/gpt-4"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        list(chat(**place, model=model, temperature=-1, stream=True))
    # Of a server that says it is Ollama, litellm doesn't ask what was wrong.
    too_long = litellm.BadRequestError if "ollama" in kind else litellm.ContextWindowExceededError
    with pytest.raises(too_long, match="8192"):
        chat(**place, model=model, messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(litellm.AuthenticationError):
        chat(**{**place, "model": model, "api_key": "wrong"})


def test_leaving_a_stream_aborts_it() -> None:
    options: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = chat(**options, stream=True)
    next(iter(stream))
    stream.completion_stream.close()
    wait_until_idle()
    with pytest.raises(litellm.Timeout):
        chat(**options, timeout=0.5)
    wait_until_idle()
