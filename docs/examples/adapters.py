"""Ask several LoRA adapters one question.

Run: ``python docs/examples/adapters.py pirate=/adapters/pirate``

The adapters' folders are as PEFT writes them. All adapters answer in one batch.
"""

import sys
from collections.abc import Sequence

import trio

import trioserve


async def ask_all(engine: trioserve.Engine, question: str) -> dict[str, str]:
    """Return the answer of each adapter, and under the name "" that of the model by itself."""
    answers: dict[str, str] = {}
    async with trio.open_nursery() as nursery:

        async def ask(adapter: str) -> None:
            completion = await engine.complete(
                question, adapter=adapter, max_tokens=16, temperature=0
            )
            answers[adapter] = completion.text

        for adapter in ("", *(each.name for each in engine.adapters)):
            nursery.start_soon(ask, adapter)
    return answers


async def main(adapters: Sequence[str] = ()) -> None:
    async with trioserve.open_engine("smollm2-135m", enable_lora=True) as engine:
        for each in adapters:
            name, _, path = each.partition("=")
            await engine.load_adapter(name, path)  # while other requests run
        answers = await ask_all(engine, "The capital of France is")
        for name, text in sorted(answers.items()):
            print(f"{name or 'no adapter'}: {text!r}")
        for adapter in engine.adapters:
            await engine.unload_adapter(adapter.name)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
