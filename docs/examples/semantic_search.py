"""Find the text nearest in meaning: ``python docs/examples/semantic_search.py "rainy day"``.

A model that generates can embed, too, if the prompt asks it for a single word. A model trained for
embeddings does it better, without this trick. TRIOSERVE_MODEL may name the folder of one.
"""

import os
import sys

import trio

import trioserve

TEXTS = (
    "The cat sleeps on the sofa.",
    "It has been raining since Monday.",
    "Stock markets fell sharply today.",
    "Flour, water, salt and yeast make bread.",
    "The kitten plays with a ball of wool.",
    "Take an umbrella, there are clouds.",
)


async def search(engine: trioserve.Engine, query: str) -> list[tuple[float, str]]:
    """Return the texts with their similarity to ``query`` (at most 1), the nearest first."""
    form = 'This sentence: "{}" means in one word: "' if engine.task == "generate" else "{}"
    found = await engine.embed([form.format(text) for text in (query, *TEXTS)])
    # float32 [texts, dimensions], each of length 1
    nearness = found.vectors[1:] @ found.vectors[0]
    return sorted(zip(nearness.tolist(), TEXTS, strict=True), reverse=True)


async def main(*queries: str) -> None:
    model = os.environ.get("TRIOSERVE_MODEL", "smollm2-135m")
    async with trioserve.open_engine(model) as engine:
        for query in queries or ("a pet", "bad weather"):
            print(query)
            for nearness, text in await search(engine, query):
                print(f"    {nearness:.3f}  {text}")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
