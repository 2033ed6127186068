"""Chat with a history: ``python docs/examples/streaming_chat.py "Hi!" "What is your name?"``."""

import sys
from collections.abc import Sequence

import trio

import trioserve

QUESTIONS = ("Name a city by the sea.", "In which country is it?")


async def chat(engine: trioserve.Engine, questions: Sequence[str]) -> None:
    messages: list[dict[str, str]] = []
    for question in questions:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        # The whole history is sent; the prefix cache has its computed beginning.
        async with engine.generate(messages, max_tokens=60, temperature=0) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
                answer += chunk.text
        messages.append({"role": "assistant", "content": answer})
        print(
            f"\n[{stream.usage.cached_tokens} of {stream.usage.prompt_tokens} tokens were cached]"
        )


async def main(questions: Sequence[str] = QUESTIONS) -> None:
    async with trioserve.open_engine("smollm2-135m") as engine:
        await chat(engine, questions)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:] or QUESTIONS)
