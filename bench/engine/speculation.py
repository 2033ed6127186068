"""Speculative decoding: ``python -m bench.engine.speculation``.

Four tasks on paragraphs of this documentation, with drafts and without, in turns. Outputs must be
the same. Outputs of other tasks and rounds aren't drafted from, and prompts whose output ends in a
loop are left out: small models loop, to drafts' advantage.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.report import Made, Rounds, Verdict, in_turns, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine

DOCS = Path(__file__).parents[2] / "docs"
TASKS = {
    "edit": "Copy this text, but write THE in place of the:\n\n{}",
    "json": "Write the sentences of this text as a JSON list of strings:\n\n{}",
    "quote": "Read this text:\n\n{}\n\nQuote its first three sentences word for word.",
    "chat": "What would you tell a beginner about this subject? {:.60}",
}
BOUNDS = {1: (2.0, 1.0), 8: (1.3, 0.98), 32: (0.98, 0.98)}
"""By streams: the least gain of the first three tasks, and of the last one."""


def paragraphs() -> list[str]:
    """Return some 60 paragraphs of the documentation, of 300 to 700 characters."""
    pages = (path.read_text() for path in sorted(DOCS.glob("*.md")))
    blocks = [" ".join(block.split()) for page in pages for block in re.split(r"\n\s*\n", page)]
    found = [block for block in blocks if 300 < len(block) < 700 and re.match(r"[A-Z]\w", block)]
    return found[:: max(len(found) // 60, 1)]


def loops(tokens: Sequence[int]) -> bool:
    """Return whether the end of ``tokens`` is a piece of up to 16 tokens, three times."""
    return any(
        len(tokens) >= 3 * size
        and tokens[-size:] == tokens[-2 * size : -size] == tokens[-3 * size : -2 * size]
        for size in range(1, 17)
    )


async def answer(
    engine: Engine, prompts: Sequence[str], streams: int, **params: Any
) -> tuple[float, list[tuple[int, ...]]]:
    """Return the seconds that all answers took, so many at a time, and their tokens."""
    found, waiting = dict[int, tuple[int, ...]](), iter(enumerate(prompts))

    async def ask() -> None:
        for place, text in waiting:
            prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            completion = await engine.complete(prompt, temperature=0, **params)
            found[place] = completion.token_ids

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(ask)
    return time.perf_counter() - began, [found[place] for place in range(len(prompts))]


@script
async def compare(
    *,
    model: str = MODEL,
    config: str = '{"method": "suffix"}',
    streams: Sequence[int] = (1, 8, 32),
    max_tokens: int = 128,
    rounds: int = 10,
) -> Made:
    """Return a table of tokens per second, and the verdicts."""
    found, texts, prompts = Rounds(), paragraphs(), dict[str, list[str]]()
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False}
    drafts = open_engine(model, speculative_config=config, **options)
    async with open_engine(model, **options) as plain, drafts as drafting:
        for task, words in TASKS.items():
            asked = [words.format(text) for text in texts]
            _, answers = await answer(plain, asked, 32, max_tokens=max_tokens)
            prompts[task] = [p for p, a in zip(asked, answers, strict=True) if not loops(a)]
        cases = [(task, count) for count in streams for task in TASKS]
        for number, (task, count) in in_turns(rounds, cases):
            own, wanted = prompts[task], min(max(2 * count, 4), len(prompts[task]))
            chosen = [own[(number * wanted + place) % len(own)] for place in range(wanted)]
            params = {"max_tokens": max_tokens, "cache_salt": f"{number} {task} {count}"}
            sides, results = [("none", plain), ("drafts", drafting)], []
            for side, engine in sides[:: 1 if number % 2 else -1]:
                seconds, answers = await answer(engine, chosen, count, **params)
                found.add((task, count, side), rate=sum(map(len, answers)) / seconds)
                results.append(answers)
            if results[0] != results[1]:
                raise RuntimeError(f"outputs differ: {task}, {count} streams")
    rates, lines, verdicts = found.medians(), [], []
    for task, count in cases:
        none, drafted = (task, count, "none"), (task, count, "drafts")
        ratio = found.ratio(drafted, none, "rate")
        shown = [f"{rates[side]['rate']:.0f}" for side in (none, drafted)]
        lines.append([task, len(prompts[task]), count, *shown, f"{ratio:.2f}"])
        bound = BOUNDS[count][task == "chat"] if count in BOUNDS else 0.98
        of = {"what": f"{task}, {count} streams", "against": "no drafts", "rounds": rounds}
        verdicts.append(attrs.asdict(Verdict(bound=bound, reached=ratio, **of)))
    heads = ["task", "prompts", "streams", "tokens/s", "with drafts", "ratio"]
    return Made(markdown(heads, lines), {"verdicts": verdicts})
