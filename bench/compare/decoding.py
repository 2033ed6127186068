"""Speculative decoding and beam search, beside none and beside the other servers'."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.compare.scenarios import InvalidRun, Taken, Turn, take
from bench.servers import MODEL, Running, exact_prompts, post
from trioserve import Engine, open_engine
from trioserve.load import Conversation
from trioserve.load.measure import Point
from trioserve.load.work import Turn as Request

DOCS = Path(__file__).parents[2] / "docs"
TASKS = {
    "edit": "Copy this text, but write THE in place of the:\n\n{}",
    "json": "Write the sentences of this text as a JSON list of strings:\n\n{}",
    "quote": "Read this text:\n\n{}\n\nQuote its first three sentences word for word.",
    "chat": "What would you tell a beginner about this subject? {:.60}",
}
MAX_TOKENS = range(96, 161)
"""Most tokens of an answer, by its prompt: with as many for all, streams would stay in step."""
Task = Sequence[tuple[str, int]]
"""Prompts, and the number of tokens of the model's answer to each."""


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


async def known_tasks() -> dict[str, Task]:
    """Return prompts on paragraphs of the documentation, with the lengths of their answers.

    Prompts whose answer ends in a loop are left out: small models loop, to drafts' advantage.
    """
    tasks: dict[str, list[tuple[str, int]]] = {task: [] for task in TASKS}

    async def ask(engine: Engine, task: str, texts: Sequence[str]) -> None:
        for text in texts:
            prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            most = MAX_TOKENS[zlib.crc32(text.encode()) % len(MAX_TOKENS)]
            answer = await engine.complete(prompt, temperature=0, max_tokens=most)
            if len(answer.token_ids) > 8 and not loops(answer.token_ids):
                tasks[task].append((prompt, len(answer.token_ids)))

    async with open_engine(MODEL, dtype="bfloat16") as engine, trio.open_nursery() as nursery:
        for task, words in TASKS.items():
            texts = [words.format(text) for text in paragraphs()]
            for first in range(8):
                nursery.start_soon(ask, engine, task, texts[first::8])
    return {task: sorted(found) for task, found in tasks.items()}


@attrs.frozen(kw_only=True)
class Speculation:
    """The tasks, to servers with drafts and without. This server's answers must be the same."""

    tasks: Mapping[str, Task]
    streams: Sequence[int] = (1, 8, 32)
    name: str = "speculation"
    alone: bool = False
    _answers: dict[str, Sequence[str]] = attrs.field(factory=dict)
    """This server's answers of each turn."""

    def warm_up(self) -> list[Turn]:
        """Return an edit."""
        return [self._turn("edit", 1, -1)]

    def turns(self, round: int) -> list[Turn]:
        """Return each task with each number of streams."""
        return [self._turn(task, streams, round) for streams in self.streams for task in TASKS]

    def _turn(self, task: str, streams: int, round: int) -> Turn:
        own, wanted = self.tasks[task], max(2 * streams, 4)
        # Outputs of other turns aren't drafted from, and their prompts aren't in the cache.
        fields = {"cache_salt": f"{task} {streams} {round}"}
        chosen = (own[(round * wanted + place) % len(own)] for place in range(wanted))
        turns = [Request(prompt=text, max_tokens=n, fields=fields) for text, n in chosen]
        point = Point(work=[Conversation(turns=(turn,)) for turn in turns], concurrency=streams)
        case = f"{task}, {point.label}"

        async def measure(one: Running) -> Taken:
            taken = await take(point, one)
            ours = one.server.name.startswith("trioserve")
            if ours and self._answers.setdefault(f"{case} {round}", taken.answers) != taken.answers:
                raise InvalidRun("drafts have changed an answer")
            return taken

        return Turn(case=case, measure=measure)


@attrs.frozen(kw_only=True)
class Beams:
    """Beam searches, one after the other; tokens are those of the beams that are returned."""

    beams: int = 4
    prompt_tokens: int = 128
    output_tokens: int = 32
    name: str = "beam_search"
    alone: bool = False

    def warm_up(self) -> list[Turn]:
        """Return a search."""
        return self.turns(-1)

    def turns(self, round: int) -> list[Turn]:
        """Return four searches with prompts of their own."""
        prompts = exact_prompts(4, self.prompt_tokens, f"{self.name} {round}")
        return [Turn(case=f"{self.beams} beams", measure=partial(self._take, prompts))]

    async def _take(self, prompts: Sequence[str], one: Running) -> Taken:
        asked = {"use_beam_search": True, "n": self.beams, "max_tokens": self.output_tokens}
        texts: list[str] = []
        began = time.perf_counter()
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "ignore_eos": True, "temperature": 0, **asked}
            answer: Any = await trio.to_thread.run_sync(post, one.port, one.server.path, body)
            if len(answer["choices"]) != self.beams:
                raise InvalidRun(f"{len(answer['choices'])} beams")
            texts.append(answer["choices"][0]["text"])
        rate = len(prompts) * self.beams * self.output_tokens / (time.perf_counter() - began)
        return Taken(values={"tokens_per_second": rate}, answers=texts)
