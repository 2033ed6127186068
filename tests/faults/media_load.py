"""Images beside streams of text: does the text keep its pace, and is anything left behind?

``python -m tests.faults.media_load``. The model is a random one: a decoder of SmolLM2-135M's sizes
behind a CLIP tower of 86 million weights, in bfloat16. In turns four streams of text run

- beside 32 requests with an image each, all the time (``images``): every image is another one, and
  nothing is kept;
- beside as many requests a second with a prompt of as many tokens, but without images (``texts``);
- by themselves (``alone``).

So the difference between the first two is what images cost a stream of text. A pause of the event
loop is the time that a task which sleeps for a millisecond wakes up too late.

Then 200 requests are cancelled while their images are read or computed, and 10,000 images pass
through a tiny model, with the memory of all processes at the way.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import trio

from bench.report import Made, markdown, run_script
from tests.support import tiny_processors
from tests.support.engines import assert_idle
from tests.support.tiny_media import TEMPLATE, make_media_model, png
from trioserve import Engine, TokensPrompt, open_engine

PHASES = ("images", "texts", "alone")
SIDE, PATCH = 224, 16
"""Pixels of an image's side, and of a patch's."""
NUM_PICTURES = 64
"""Pictures that come in turns; those in flight are always different."""
_STREAM_TOKENS = 64
_LOOK_EVERY = 0.001
_FLAT = 1.02
"""Most growth of memory that counts as none."""
_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "mm_processor_cache_gb": 0.0,
    "enable_prefix_caching": False,
}


def make_model(folder: Path) -> Path:
    """Write the random model into ``folder``."""
    import torch
    import transformers

    processor = tiny_processors.llava(folder, side=SIDE, patch=PATCH)
    config = transformers.LlavaConfig(
        text_config={
            **{"model_type": "llama", "vocab_size": 320, "hidden_size": 576},
            **{"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
            **{"num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048},
            **{"bos_token_id": 256, "eos_token_id": 319, "pad_token_id": 256},
        },
        vision_config={
            **{"model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072},
            **{"num_hidden_layers": 12, "num_attention_heads": 12, "projection_dim": 512},
            **{"image_size": SIDE, "patch_size": PATCH},
        },
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def conversation(picture: bytes) -> list[dict[str, Any]]:
    """Return a chat with ``picture``."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": content}]


@attrs.define(eq=False)
class Phase:
    """The observations of all turns of a phase: gaps between tokens and pauses, in ms."""

    gaps: list[float] = attrs.field(factory=list)
    pauses: list[float] = attrs.field(factory=list)
    answered: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Requests answered in a second, without the streams."""
        return self.answered / self.seconds


@attrs.define(eq=False, kw_only=True)
class MediaLoad:
    """The load of one engine.

    Args:
        engine: Engine of the model of :func:`make_model`.
        streams: Streams of text.
        in_flight: Requests beside them.
        seconds: Length of a turn.
    """

    engine: Engine
    streams: int = 4
    in_flight: int = 32
    seconds: float = 15.0
    phases: dict[str, Phase] = attrs.field(init=False)
    _pictures: Any = attrs.field(init=False)
    _prompt_tokens: int = attrs.field(init=False, default=0)
    _texts: random.Random = attrs.field(init=False, factory=lambda: random.Random(0))

    def __attrs_post_init__(self) -> None:
        self.phases = {name: Phase() for name in PHASES}
        self._pictures = itertools.cycle([png(each, (320, 240)) for each in range(NUM_PICTURES)])

    async def run(self, name: str) -> None:
        """Take a turn of a phase."""
        phase = self.phases[name]
        async with trio.open_nursery() as nursery:
            for _ in range(self.streams):
                nursery.start_soon(self._stream, phase)
            if name == "images":
                for _ in range(self.in_flight):
                    nursery.start_soon(self._ask_again, phase)
            elif name == "texts":
                nursery.start_soon(self._ask_at, self.phases["images"].rate, phase, nursery)
            await trio.sleep(2.0)  # Until as many run as will.
            nursery.start_soon(_note_pauses, phase.pauses)
            await trio.sleep(self.seconds)
            phase.seconds += 2.0 + self.seconds
            nursery.cancel_scope.cancel()

    async def _stream(self, phase: Phase) -> None:
        while True:
            prompt = TokensPrompt(tuple(self._texts.choices(range(256), k=20)))
            fields: dict[str, Any] = {"max_tokens": _STREAM_TOKENS, "ignore_eos": True}
            async with self.engine.generate(prompt, **fields) as stream:
                last = None
                async for _ in stream:
                    now = trio.current_time()
                    if last is not None:
                        phase.gaps.append(1000 * (now - last))
                    last = now

    async def _ask_again(self, phase: Phase) -> None:
        while True:
            found = await self.engine.complete(conversation(next(self._pictures)), max_tokens=1)
            self._prompt_tokens = len(found.prompt_token_ids)
            phase.answered += 1

    async def _ask_at(self, rate: float, phase: Phase, nursery: trio.Nursery) -> None:
        async def ask() -> None:
            ids = self._texts.choices(range(256), k=self._prompt_tokens)
            await self.engine.complete(TokensPrompt(tuple(ids)), max_tokens=1)
            phase.answered += 1

        while True:
            nursery.start_soon(ask)
            await trio.sleep(self._texts.expovariate(rate))

    async def cancel(self, count: int) -> dict[str, int]:
        """Cancel ``count`` requests while their images are read; return what is left of them."""
        await self.engine.complete(conversation(next(self._pictures)), max_tokens=1)
        before = _holdings()

        async def ask(seconds: float) -> None:
            with trio.move_on_after(seconds):
                await self.engine.complete(conversation(next(self._pictures)), max_tokens=1)

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(ask, self._texts.uniform(0, 0.5))
                await trio.sleep(0.01)
        with trio.fail_after(60):
            await assert_idle(self.engine)
            # A part that a worker had begun is computed to its end.
            await self.engine.complete(conversation(next(self._pictures)), max_tokens=1)
            while any((left := _left(before)).values()):
                await trio.sleep(0.05)
        return left


async def _note_pauses(pauses: list[float]) -> None:
    while True:
        due = trio.current_time() + _LOOK_EVERY
        await trio.sleep_until(due)
        pauses.append(1000 * (trio.current_time() - due))


def _holdings() -> dict[str, int]:
    own = psutil.Process()
    return {
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "descriptors": own.num_fds(),
        "processes": len(own.children(recursive=True)),
    }


def _left(before: dict[str, int]) -> dict[str, int]:
    # Processes that read media are kept for the next part.
    return {name: max(count - before[name], 0) for name, count in _holdings().items()}


async def pass_images(folder: Path, count: int) -> list[float]:
    """Return the MiB of all processes after each tenth of ``count`` images of a tiny model."""
    options: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64}
    used: list[float] = []
    async with open_engine(str(folder), **options, mm_processor_cache_gb=0.001) as engine:
        numbers = iter(range(count))

        async def ask() -> None:
            for number in numbers:
                await engine.complete(conversation(png(number)), max_tokens=1)
                if (number + 1) % (count // 10) == 0:
                    used.append(_memory())

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
        await assert_idle(engine)
    return used


def _memory() -> float:
    """Return the MiB that this process and its children hold, shared pages in parts."""
    own = psutil.Process()
    total = 0
    for each in (own, *own.children(recursive=True)):
        try:
            total += each.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


async def _measure(options: argparse.Namespace, folder: Path) -> Made:
    async with open_engine(str(make_model(folder / "large")), **_OPTIONS) as engine:
        load = MediaLoad(engine=engine, seconds=options.seconds)
        for number in range(options.rounds):
            for name in PHASES:
                print(f"round {number}: {name}")
                await load.run(name)
        left = await load.cancel(options.cancelled)
    used = await pass_images(make_media_model("llava", folder / "tiny"), options.images)
    return figures(load, left, used, options)


def figures(
    load: MediaLoad, left: dict[str, int], used: Sequence[float], options: argparse.Namespace
) -> Made:
    """Return the tables; the exit code is 1 if a goal is missed."""
    phases = load.phases
    lines = [
        [
            name,
            f"{phase.rate:.2f}" if name != "alone" else "",
            _spread(phase.gaps),
            _spread(phase.pauses),
        ]
        for name, phase in phases.items()
    ]
    heads = [
        "ms, p50 · p99 · most: 4 streams beside",
        "requests/s",
        "gap between tokens",
        "pause of the loop",
    ]
    p99 = {name: _p99(phase.gaps) for name, phase in phases.items()}
    second = [
        ["gap's p99, images to texts", f"{p99['images'] / p99['texts']:.2f}"],
        ["gap's p99, images to alone", f"{p99['images'] / p99['alone']:.2f}"],
        [f"left of {options.cancelled} cancelled requests", sum(left.values())],
        [f"MiB after {options.images // 5} images", f"{used[1]:.0f}"],
        [f"MiB after {options.images} images", f"{used[-1]:.0f}"],
    ]
    goals = {
        "keeps_pace": p99["images"] <= 1.1 * p99["texts"],
        "loop_runs": max(phases["images"].pauses) <= 20.0,
        "nothing_left": not any(left.values()),
        "memory_is_flat": used[-1] <= _FLAT * used[1],
    }
    table = f"{markdown(heads, lines)}\n\n{markdown(['', ''], second)}"
    return Made(table, goals, int(not all(goals.values())))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} · {_p99(values):.1f} · {max(values):.1f}"


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def measure(options: argparse.Namespace) -> Made:
    """Return the figures of images beside streams of text."""
    with tempfile.TemporaryDirectory() as folder:
        return trio.run(_measure, options, Path(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a goal is missed."""
    options = {"rounds": 4, "seconds": 15.0, "cancelled": 200, "images": 10_000}
    return run_script("faults_media_load", measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
