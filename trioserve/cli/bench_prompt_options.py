"""The options of the requests that ``trioserve bench`` sends: prompts, lengths, clients that leave.

Nothing is imported here that ``--help`` doesn't need.
"""

from __future__ import annotations

import attrs

from trioserve.cli.remote_options import RemoteOptions
from trioserve.config.options import option

__all__ = ["PromptOptions"]

DATASETS = ("random", "fixed", "shared-prefix", "chat", "sharegpt", "json")


@attrs.frozen(kw_only=True)
class PromptOptions(RemoteOptions):
    """The requests of a measurement."""

    dataset: str = option(
        "random",
        "random: words, lengths drawn with --range-ratio; fixed: one prompt again and again; "
        "shared-prefix: groups that begin alike; chat: several turns, with the answers so far; "
        "sharegpt: conversations from --data; json: answers that follow a schema",
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
        "tokens of an answer (default: 128; with sharegpt as many as in the file)",
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
        "tokens that prompts begin with alike, or of chat's system message (default: 512 with "
        "shared-prefix, else 0)",
        group="work",
        common=True,
        kind=int,
        low=0,
    )
    prefix_groups: int = option(
        4, "different beginnings with shared-prefix", group="work", kind=int, low=1
    )
    turns: int | None = option(
        None,
        "turns of each conversation, at most those in the file with sharegpt (default: 4 with "
        "chat, 1 with sharegpt)",
        group="work",
        common=True,
        kind=int,
        low=1,
    )
    think_time: float = option(
        0.0, "mean seconds between an answer and the next turn", group="work", kind=float, low=0
    )
    prompt: str | None = option(
        None, "the text that fixed sends (default: random words)", group="work"
    )
    data: str | None = option(
        None, "ShareGPT's file, for sharegpt", group="work", common=True, metavar="FILE"
    )
    json_schema: str | None = option(
        None,
        "file with the schema that json's answers follow (default: three small ones in turns)",
        group="work",
        metavar="FILE",
    )
    temperature: float = option(0.0, "of sampling", group="work", kind=float, low=0)
    ignore_eos: bool | None = option(
        None,
        "have answers go on to their length past the model's end of text; servers that don't know "
        "the field refuse it (default: on, except for json and a --prompt)",
        group="work",
        common=True,
        kind=bool,
    )
    cancel_rate: float = option(
        0.0,
        "share of requests whose client leaves before the end",
        group="work",
        kind=float,
        low=0,
        high=1,
    )
    cancel_seconds: tuple[float, ...] = option(
        (),
        "the client leaves so long after sending: one number, or two to draw between",
        group="work",
        kind=float,
        low=0,
        repeatable=True,
    )
    cancel_events: tuple[int, ...] = option(
        (),
        "the client leaves after so many events: one number, or two to draw between (default: 1 to "
        "half the answer)",
        group="work",
        kind=int,
        low=1,
        repeatable=True,
    )
