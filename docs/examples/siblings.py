"""Several prompts as children of one nursery: ``python docs/examples/siblings.py``.

They are computed together. When the time is over, the result is what has come until then.
"""

import trio

import trioserve

SECONDS = 3.0
OPENINGS = ("The sea was", "In the city", "My grandmother", "The last train")


async def continue_text(engine: trioserve.Engine, opening: str, texts: dict[str, str]) -> None:
    texts[opening] = ""
    async with engine.generate(opening, max_tokens=1000, ignore_eos=True, seed=1) as stream:
        async for chunk in stream:
            texts[opening] += chunk.text


async def first_to_answer(engine: trioserve.Engine, question: str) -> str:
    """Ask three times and return the first answer; the others are aborted."""
    answers: list[str] = []
    async with trio.open_nursery() as nursery:

        async def ask(seed: int) -> None:
            messages = [{"role": "user", "content": question}]
            answers.append(
                (await engine.complete(messages, max_tokens=80, temperature=0.5, seed=seed)).text
            )
            nursery.cancel_scope.cancel()

        for seed in range(3):
            nursery.start_soon(ask, seed)
    return answers[0]


async def main() -> None:
    async with trioserve.open_engine("smollm2-135m") as engine:
        texts: dict[str, str] = {}
        with trio.move_on_after(SECONDS):
            async with trio.open_nursery() as nursery:
                for opening in OPENINGS:
                    nursery.start_soon(continue_text, engine, opening, texts)
        for opening, text in texts.items():
            print(f"{opening}{text[:40]!r}… {len(text)} characters")
        print("first:", await first_to_answer(engine, "Name a color."))


if __name__ == "__main__":
    trio.run(main)
