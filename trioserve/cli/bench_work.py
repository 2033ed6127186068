"""The requests of ``trioserve bench``, made by its options."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.usage import UsageError
from trioserve.load.datasets import (
    Lengths,
    chats,
    fixed_prompt,
    random_prompts,
    shared_prefixes,
    structured,
    with_cancellations,
)
from trioserve.load.sharegpt import load_sharegpt
from trioserve.load.texts import CountedTexts, GuessedTexts, Texts
from trioserve.load.work import Conversation
from trioserve.model_files import load_tokenizer_from, locate, open_model
from trioserve.model_files.locate import KNOWN_MODELS
from trioserve.protocol.errors import ModelLoadError

_OUTPUT_TOKENS = 128
_PREFIX_TOKENS = 512
_TURNS = 4
_SEED_STEP = 1_000_003
"""Distance between the seeds of two points, so that their prompts differ."""


def make_texts(options: BenchOptions, model: str) -> Texts:
    """Return a source of prompts: by ``--tokenizer``, the model's tokenizer, or a guess.

    Tokenizers are read from the disk.

    Raises:
        UsageError: ``--tokenizer`` names no tokenizer.
    """
    if options.tokenizer is None:
        # A Hub id isn't looked up, because that could start a download.
        if model not in KNOWN_MODELS and not Path(model).exists():
            return GuessedTexts()
        try:
            return CountedTexts(open_model(locate(model)).load_tokenizer())
        except ModelLoadError:
            return GuessedTexts()
    try:
        if options.tokenizer.endswith(".json"):
            return CountedTexts(load_tokenizer_from(options.tokenizer))
        return CountedTexts(open_model(locate(options.tokenizer)).load_tokenizer())
    except ModelLoadError as error:
        raise UsageError(f"--tokenizer: {error}") from error


def make_work(options: BenchOptions, texts: Texts, count: int, *, point: int) -> list[Conversation]:
    """Return ``count`` conversations for the measurement number ``point``; -1 is the warm-up.

    Raises:
        UsageError: A file of an option can't be used.
        DataError: The file of conversations can't be used.
    """
    seed = options.seed + _SEED_STEP * (point + 1)
    return cancelled(options, _dataset(options, texts, count, seed), seed)


def cancelled(options: BenchOptions, work: list[Conversation], seed: int) -> list[Conversation]:
    """Return ``work`` with clients that disconnect, by ``--cancel-rate`` and related options."""
    if not options.cancel_rate:
        return work
    seconds, events = options.cancel_seconds, options.cancel_events
    if seconds or events:
        return with_cancellations(
            work,
            rate=options.cancel_rate,
            seconds=(seconds[0], seconds[-1]) if seconds else None,
            events=(events[0], events[-1]) if events else None,
            seed=seed,
        )
    # Clients disconnect in the first half of an answer; answers from a file differ in length.
    rng = random.Random(f"{seed} cancellations")
    left: list[Conversation] = []
    for one in work:
        shortest = min(turn.max_tokens or _OUTPUT_TOKENS for turn in one.turns)
        left += with_cancellations(
            [one],
            rate=options.cancel_rate,
            events=(1, max(shortest // 2, 1)),
            seed=rng.getrandbits(32),
        )
    return left


def _dataset(options: BenchOptions, texts: Texts, count: int, seed: int) -> list[Conversation]:
    tokens_out = options.output_tokens or _OUTPUT_TOKENS
    lengths = Lengths(
        input_tokens=options.input_tokens,
        output_tokens=tokens_out,
        range_ratio=options.range_ratio,
    )
    prefix = options.prefix_tokens
    if options.dataset == "fixed":
        prompt = options.prompt
        if prompt is None:
            (one,) = random_prompts(texts, 1, lengths, prefix_tokens=prefix or 0, seed=options.seed)
            prompt = str(one.turns[0].prompt)
        return fixed_prompt(prompt, count, tokens_out)
    if options.dataset == "shared-prefix":
        return shared_prefixes(
            texts,
            count,
            lengths,
            groups=options.prefix_groups,
            prefix_tokens=_PREFIX_TOKENS if prefix is None else prefix,
            seed=seed,
        )
    if options.dataset == "chat":
        return chats(
            texts,
            count,
            lengths,
            turns=options.turns or _TURNS,
            system_tokens=prefix or 0,
            pause=options.think_time,
            seed=seed,
        )
    if options.dataset == "sharegpt":
        return load_sharegpt(
            Path(str(options.data)),
            texts,
            count,
            turns=options.turns or 1,
            output_tokens=options.output_tokens,
            seed=seed,
        )
    if options.dataset == "json":
        return structured(count, tokens_out, schema=_schema(options), seed=seed)
    return random_prompts(texts, count, lengths, prefix_tokens=prefix or 0, seed=seed)


def _schema(options: BenchOptions) -> dict[str, Any] | None:
    if options.json_schema is None:
        return None
    try:
        schema = json.loads(Path(options.json_schema).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--json-schema: {options.json_schema} can't be read: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"--json-schema: {options.json_schema} holds no JSON object")
    return schema
