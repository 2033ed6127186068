"""The options of ``trioserve bench`` for requests: prompts, lengths, disconnecting clients.

Nothing is imported here that ``--help`` doesn't need.
"""

from __future__ import annotations

import attrs

from trioserve.cli.remote_options import RemoteOptions
from trioserve.config.options import option

DATASETS = ("random", "fixed", "shared-prefix", "chat", "sharegpt", "json")


@attrs.frozen(kw_only=True)
class PromptOptions(RemoteOptions):
    """Options of the requests of a measurement."""

    dataset: str = option(
        "random",
        "random: words, with lengths drawn by --range-ratio; fixed: one prompt again and "
        "again; shared-prefix: groups of prompts that begin alike; chat: several turns, with "
        "the answers so far; sharegpt: conversations from --data; json: answers that follow a "
        "schema",
        choices=DATASETS,
        group="work",
        common=True,
    )
    input_tokens: int = option(
        128,
        "tokens of a prompt, or of a turn's message",
        group="work",
        common=True,
        kind=int,
        low=1,
    )
    output_tokens: int | None = option(
        None,
        "tokens of an answer",
        unset="128; with sharegpt as many as in the file",
        group="work",
        common=True,
        kind=int,
        low=1,
    )
    range_ratio: float = option(
        0.0,
        "draw lengths from n * (1 - X) to n * (1 + X), as vLLM's tool does",
        group="work",
        common=True,
        kind=float,
        low=0,
        high=0.99,
    )
    prefix_tokens: int | None = option(
        None,
        "tokens that prompts share at their beginning, or tokens of chat's system message",
        unset="512 with shared-prefix, else 0",
        group="work",
        common=True,
        kind=int,
        low=0,
    )
    prefix_groups: int = option(
        4, "different beginnings of prompts with shared-prefix", group="work", kind=int, low=1
    )
    turns: int | None = option(
        None,
        "turns of each conversation, at most those in the file with sharegpt",
        unset="4 with chat, 1 with sharegpt",
        group="work",
        common=True,
        kind=int,
        low=1,
    )
    think_time: float = option(
        0.0, "mean seconds between an answer and the next turn", group="work", kind=float, low=0
    )
    prompt: str | None = option(None, "text that fixed sends", unset="random words", group="work")
    data: str | None = option(
        None,
        "file of ShareGPT's conversations, for sharegpt",
        group="work",
        common=True,
        metavar="FILE",
    )
    json_schema: str | None = option(
        None,
        "file with the schema that json's answers follow",
        unset="three small ones in turns",
        group="work",
        metavar="FILE",
    )
    temperature: float = option(
        0.0,
        "sampling temperature; 0 always takes the most probable token",
        group="work",
        kind=float,
        low=0,
    )
    ignore_eos: bool | None = option(
        None,
        "generate answers to their full length, past the model's end of text; servers that "
        "don't know the field refuse it",
        unset="on, except for json and a --prompt",
        group="work",
        common=True,
        kind=bool,
    )
    cancel_rate: float = option(
        0.0,
        "share of requests whose client disconnects before the end",
        group="work",
        kind=float,
        low=0,
        high=1,
    )
    cancel_seconds: tuple[float, ...] = option(
        (),
        "seconds after sending at which such a client disconnects: one number, or two to draw "
        "between",
        group="work",
        kind=float,
        low=0,
        repeatable=True,
    )
    cancel_events: tuple[int, ...] = option(
        (),
        "number of events after which such a client disconnects: one number, or two to draw "
        "between",
        unset="1 to half the answer",
        group="work",
        kind=int,
        low=1,
        repeatable=True,
    )
