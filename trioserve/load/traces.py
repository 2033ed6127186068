"""Traces of real servers: requests with their arrival times.

A trace is a file of JSON lines, a JSON list, or CSV with a header. Fields have several names:

==================  =====================================================================
field               names
==================  =====================================================================
time of arrival     ``timestamp``: a number, or a date by ISO 8601 (UTC unless it has a
                    zone)
tokens in           ``input_length`` (Mooncake), ``ContextTokens`` (Azure), ``Request tokens``
                    (BurstGPT), ``input_tokens``, ``prompt_tokens``, ``num_prefill_tokens``
tokens out          ``output_length``, ``GeneratedTokens``, ``Response tokens``,
                    ``output_tokens``, ``completion_tokens``, ``num_decode_tokens``
blocks of a prompt  ``hash_ids`` (Mooncake): numbers of its blocks of 512 tokens; prompts with the
                    same first numbers have a common prefix
the prompt itself   ``prompt`` or ``messages``, in place of its length
==================  =====================================================================

Names ignore case. With the unit ``auto``, a number is in milliseconds in Mooncake's traces (those
with ``input_length``) and in seconds in others.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import msgspec

from trioserve.load.sharegpt import DataError
from trioserve.load.texts import Texts
from trioserve.load.work import Conversation, Turn

TIME_UNITS = ("auto", "s", "ms")

_INPUTS = (
    *("input_length", "contexttokens", "request tokens"),
    *("input_tokens", "prompt_tokens", "num_prefill_tokens"),
)
_OUTPUTS = (
    *("output_length", "generatedtokens", "response tokens"),
    *("output_tokens", "completion_tokens", "num_decode_tokens"),
)
_BLOCK_TOKENS = 512


@attrs.frozen(kw_only=True)
class TraceRow:
    """One request of a trace. ``at`` is its arrival in seconds, from any origin."""

    at: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = _BLOCK_TOKENS
    """Tokens of a block that ``hash_ids`` names."""
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def load_trace(path: Path, *, unit: str = "auto", most: int | None = None) -> list[TraceRow]:
    """Return the requests of the file, sorted by time; only the first ``most``.

    Raises:
        DataError: The file can't be read or isn't a trace; the message names the line.
    """
    rows: list[TraceRow] = []
    for number, fields in enumerate(_read(path), 1):
        try:
            rows.append(_row({name.strip().lower(): fields[name] for name in fields}, unit))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}, request {number}: {_reason(error)}") from error
    if not rows:
        raise DataError(f"{path} holds no requests")
    rows.sort(key=lambda row: row.at)
    return rows[:most]


def scaled_lengths(rows: Iterable[TraceRow], factor: float) -> list[TraceRow]:
    """Return ``rows`` with lengths times ``factor``, at least 1; a given prompt stays as it is.

    Prompts have the same share of blocks in common as before.
    """
    return [
        attrs.evolve(
            row,
            input_tokens=max(round(row.input_tokens * factor), 1) if row.input_tokens else 0,
            output_tokens=max(round(row.output_tokens * factor), 1),
            block_tokens=max(round(row.block_tokens * factor), 1),
        )
        for row in rows
    ]


def trace_work(rows: list[TraceRow], texts: Texts, *, seed: int = 0) -> list[Conversation]:
    """Return a conversation of one turn for each row; rows without a prompt get random words."""
    return [
        Conversation(turns=(_turn(row, number, texts, seed),)) for number, row in enumerate(rows)
    ]


def _turn(row: TraceRow, number: int, texts: Texts, seed: int) -> Turn:
    if row.messages is not None:
        return Turn(messages=row.messages, max_tokens=row.output_tokens)
    prompt = row.prompt
    if prompt is None:
        prompt = _words(row, number, texts, seed)
    return Turn(prompt=prompt, max_tokens=row.output_tokens)


def _words(row: TraceRow, number: int, texts: Texts, seed: int) -> str:
    if not row.hash_ids:
        return texts.make(row.input_tokens, random.Random(f"{seed} row {number}"))
    parts: list[str] = []
    left = row.input_tokens
    for block in row.hash_ids:
        size = min(left, row.block_tokens)
        if size > 0:
            parts.append(texts.make(size, random.Random(f"{seed} block {block}")))
        left -= size
    if left > 0:
        parts.append(texts.make(left, random.Random(f"{seed} row {number}")))
    return " ".join(parts)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip()[:1] == "[":
            yield from msgspec.json.decode(text, type=list[dict[str, Any]])
        elif text.lstrip()[:1] == "{":
            for line in text.splitlines():
                if line.strip():
                    yield msgspec.json.decode(line, type=dict[str, Any])
        else:
            yield from csv.DictReader(text.splitlines())
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is neither JSON lines nor CSV: {error}") from error


def _row(fields: Mapping[str, Any], unit: str) -> TraceRow:
    texts: dict[str, Any] = {}
    if fields.get("messages"):
        texts["messages"] = tuple(fields["messages"])
    elif fields.get("prompt"):
        texts["prompt"] = str(fields["prompt"])
    tokens_in = 0 if texts else _number(fields, _INPUTS)
    tokens_out = _number(fields, _OUTPUTS)
    if tokens_out < 1 or (tokens_in < 1 and not texts):
        raise ValueError(f"lengths must be at least 1, got {tokens_in} in and {tokens_out} out")
    return TraceRow(
        at=_seconds(fields, unit),
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        hash_ids=tuple(int(block) for block in fields.get("hash_ids") or ()),
        **texts,
    )


def _number(fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if fields.get(name) not in (None, ""):
            return int(fields[name])
    raise KeyError(names[0])


def _seconds(fields: Mapping[str, Any], unit: str) -> float:
    given = fields["timestamp"]
    try:
        number = float(given)
    except ValueError:
        date = datetime.fromisoformat(str(given).strip())
        # Not the local zone, which may lack an hour of the year.
        return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    in_ms = unit == "ms" or (unit == "auto" and "input_length" in fields)
    return number / 1000 if in_ms else number


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
