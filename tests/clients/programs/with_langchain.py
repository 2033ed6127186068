"""Programs with langchain-openai."""

from __future__ import annotations

import asyncio
import functools
from enum import StrEnum
from typing import Annotated, Any

import openai
import pytest
from asked_server import KEY, MODEL, URL, wait_until_idle
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

PLACE: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
ONE_CALL: dict[str, Any] = {"strict": True, "parallel_tool_calls": False}
CAPITAL = "What is the capital of France?"

Unit = StrEnum("Unit", ["celsius", "fahrenheit"])


@tool
def weather(city: Annotated[str, Field(max_length=20)], unit: Unit) -> str:
    """Return the weather in a city."""
    return f"It rains in {city}."


class Verdict(BaseModel):
    """Truth of a statement."""

    sure: bool
    unit: Unit


def chat(**options: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 40, "stream_usage": True, **options}
    return ChatOpenAI(**PLACE, **options)


def sum_of(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return functools.reduce(lambda one, other: one + other, chunks)


def test_an_answer_and_the_same_answer_streamed() -> None:
    whole = chat().invoke(CAPITAL)
    chunks = list(chat().stream(CAPITAL))
    assert len(chunks) > 2
    streamed = sum_of(chunks)
    assert streamed.text == whole.text
    assert streamed.text
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    for message in (whole, streamed):
        assert message.response_metadata["model_name"] == MODEL
        assert message.response_metadata["finish_reason"] in ("stop", "length")


def test_a_conversation() -> None:
    messages = [
        SystemMessage("You are a geographer."),
        HumanMessage("My favourite city is Rome."),
        chat(max_tokens=5).invoke("Say something."),
        HumanMessage([{"type": "text", "text": "Which one did I name?"}]),
    ]
    assert chat().invoke(messages).text


def test_a_chain_in_batches() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    chain = prompt | chat(max_tokens=8) | StrOutputParser()
    texts = chain.batch([{"question": CAPITAL}, {"question": "What is 2 + 2?"}])
    assert len(texts) == 2
    assert all(texts)
    assert "".join(chain.stream({"question": CAPITAL}))


def test_the_asynchronous_half() -> None:
    async def ask() -> tuple[str, str]:
        model = chat()
        whole = await model.ainvoke(CAPITAL)
        return whole.text, "".join([chunk.text async for chunk in model.astream(CAPITAL)])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
    assert whole


def test_sampling_stop_and_several_generations() -> None:
    options: dict[str, Any] = {"top_p": 0.9, "seed": 7, "extra_body": {"top_k": 20}}
    drawn = chat(temperature=0.9, n=3, max_tokens=8, **options).generate([[HumanMessage("Hi")]])
    assert len(drawn.generations[0]) == 3
    text = chat().invoke(CAPITAL).text
    stop = text[len(text) // 2 :][:4]
    stopped = chat().invoke(CAPITAL, stop=[stop])
    assert stopped.text == text.partition(stop)[0]
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_log_probabilities() -> None:
    message = chat(logprobs=True, top_logprobs=2, max_tokens=4).invoke(CAPITAL)
    entries = message.response_metadata["logprobs"]["content"]
    assert len(entries) == 4
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("choice", ["weather", "any"])
def test_a_tool_that_has_to_be_called(choice: str) -> None:
    model = chat(max_tokens=80).bind_tools([weather], tool_choice=choice, **ONE_CALL)
    asked = HumanMessage("What is the weather in Paris?")
    whole = model.invoke([asked])
    (call,) = whole.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.text.startswith("It rains in ")

    (same,) = sum_of(list(model.stream([asked]))).tool_calls
    assert same["args"] == call["args"]

    answer = chat().bind_tools([weather], tool_choice="none").invoke([asked, whole, result])
    assert answer.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method: Any) -> None:
    model = chat(max_tokens=200).with_structured_output(Verdict, method=method, include_raw=True)
    answer = model.invoke("Is it warm in Rome?")
    assert isinstance(answer, dict)
    assert isinstance(answer["parsed"], Verdict), answer
    plain = chat(max_tokens=200).with_structured_output(Verdict, method=method)
    *_, last = plain.stream("Is it warm in Rome?")
    assert last == answer["parsed"]


def test_an_answer_that_is_one_of_several() -> None:
    choice = {"structured_outputs": {"choice": ["red", "blue"]}}
    assert chat(extra_body=choice).invoke("A colour?").text in ("red", "blue")


def test_responses() -> None:
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("My name is Ada.")
    assert first.text
    assert first.usage_metadata is not None
    second = sum_of(
        list(model.stream([HumanMessage("My name is Ada."), first, HumanMessage("And?")]))
    )
    assert second.text
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    model = chat(use_responses_api=True, max_tokens=80)
    forced = model.bind_tools([weather], tool_choice="weather", **ONE_CALL)
    (call,) = forced.invoke("Is it warm in Rome?").tool_calls
    assert set(call["args"]) == {"city", "unit"}


def test_a_completion() -> None:
    model = OpenAI(**PLACE, temperature=0, max_tokens=12)
    whole = model.invoke("The capital of France is")
    assert whole
    assert "".join(model.stream("The capital of France is")) == whole
    assert len(model.batch(["One, two,", "Once upon a time"])) == 2


def test_embeddings() -> None:
    # The server takes the texts: what would be sent else are tokens of a model of OpenAI's.
    embeddings = OpenAIEmbeddings(**PLACE, check_embedding_ctx_length=False)
    one, other = embeddings.embed_documents(["a cat", "a dog"])
    assert len(one) == len(other) == len(embeddings.embed_query("a cat"))


def test_errors_are_those_that_the_client_knows() -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        chat().invoke(CAPITAL, model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        list(chat(temperature=-1).stream(CAPITAL))
    with pytest.raises(openai.BadRequestError, match="8192") as long:
        chat().invoke("word " * 9000)
    assert type(long.value).__name__ == "OpenAIContextOverflowError"
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(**{**PLACE, "api_key": "wrong"}).invoke(CAPITAL)


def test_leaving_a_stream_aborts_it() -> None:
    model = chat(max_tokens=4000, extra_body={"ignore_eos": True})
    stream = model.stream(CAPITAL)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle()

    async def leave() -> None:
        async with asyncio.timeout(0.5):
            await model.ainvoke(CAPITAL)

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    wait_until_idle()
