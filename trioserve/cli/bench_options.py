"""The options of ``trioserve bench``: the server, the load and the results.

Nothing is imported here that ``--help`` doesn't need.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.cli.bench_prompt_options import PromptOptions
from trioserve.config.options import OptionGroup, flag_name, option, options_of
from trioserve.protocol.errors import InvalidRequest

_LIMITS = ("ttft", "tpot", "e2el")
_REPLACED_BY_A_TRACE = (
    *("dataset", "data", "prompt", "json_schema", "input_tokens", "output_tokens", "range_ratio"),
    *("prefix_tokens", "prefix_groups", "turns", "think_time"),
)
"""Options that a trace replaces."""

BENCH_GROUPS = {
    "target": OptionGroup("Server or embedded engine", "benchmarking#Benchmarking"),
    "load": OptionGroup(
        "Load (a closed loop, unless --request-rate or --trace is given)",
        "benchmarking#How requests are sent",
    ),
    "work": OptionGroup("Requests", "benchmarking#What is asked"),
    "results": OptionGroup("Results", "benchmarking#What comes out"),
}
"""Groups of options, in the order of help."""


@attrs.frozen(kw_only=True)
class BenchOptions(PromptOptions):
    """The options of ``trioserve bench``.

    Raises:
        InvalidRequest: A value isn't allowed, or two options contradict; ``param`` names one.
    """

    embedded: str | None = option(
        None,
        "open an engine with this model in this process, in place of a server",
        group="target",
        common=True,
        metavar="MODEL",
    )
    engine_option: tuple[str, ...] = option(
        (),
        "options of the embedded engine, named as trioserve serve's: max-num-seqs=64",
        group="target",
        common=True,
        metavar="NAME=VALUE",
        repeatable=True,
        form=(r"[A-Za-z][\w-]*=.*", "NAME=VALUE"),
    )
    model: str | None = option(
        None,
        "name of the model in requests",
        unset="the first that the server lists",
        group="target",
        common=True,
        metavar="NAME",
    )
    endpoint: str = option(
        "auto",
        "endpoint to send requests to: /v1/completions or /v1/chat/completions; auto takes "
        "chat for the data sets chat and json and for a trace with messages",
        choices=("auto", "completions", "chat"),
        group="target",
    )
    header: tuple[str, ...] = option(
        (),
        "further headers of every request",
        group="target",
        metavar="NAME:VALUE",
        repeatable=True,
        form=(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+:[^\r\n]*", "NAME:VALUE in one line"),
        secret=True,
    )
    extra_body: str | None = option(
        None,
        'further fields of every request, as JSON: {"top_p": 0.9}',
        group="target",
        metavar="JSON",
    )
    request_timeout: float = option(
        600.0, "seconds that one request may take", group="target", kind=float, above=0
    )
    tokenizer: str | None = option(
        None,
        "model, folder or tokenizer.json that measures prompts",
        unset=(
            "the model's own where it is on this machine; without one, lengths of prompts are "
            "approximate"
        ),
        group="target",
        common=True,
        metavar="PATH",
    )

    concurrency: tuple[int, ...] = option(
        (),
        "closed loop: streams that each send a request as soon as the one before is answered; "
        "several numbers are measured one after the other",
        unset="8, or --num-prompts if that is less",
        group="load",
        common=True,
        kind=int,
        low=1,
        repeatable=True,
    )
    request_rate: tuple[float, ...] = option(
        (),
        "open loop: requests a second, sent on time even if earlier ones aren't answered; "
        "several numbers are measured one after the other; inf, with --num-prompts, sends all "
        "at once",
        group="load",
        common=True,
        kind=float,
        above=0,
        repeatable=True,
    )
    arrivals: str = option(
        "poisson",
        "times of an open loop: drawn at random (poisson) or evenly spaced (constant)",
        choices=("poisson", "constant"),
        group="load",
    )
    max_concurrency: int | None = option(
        None,
        "most open requests of an open loop or a trace; the others wait",
        unset="no limit",
        group="load",
        kind=int,
        low=1,
    )
    trace: str | None = option(
        None,
        "file with the lengths and times of requests to send: JSON lines or CSV as in "
        "Mooncake's, Azure's and BurstGPT's traces",
        group="load",
        common=True,
        metavar="FILE",
    )
    trace_unit: str = option(
        "auto",
        "unit of the trace's times: auto is ms for Mooncake's, s for others",
        choices=("auto", "s", "ms"),
        group="load",
    )
    trace_speed: float = option(
        1.0, "factor by which the trace is replayed faster", group="load", kind=float, above=0
    )
    trace_scale: float = option(
        1.0,
        "factor of the lengths of the trace's prompts and answers",
        group="load",
        kind=float,
        above=0,
    )
    num_prompts: int | None = option(
        None,
        "requests of each measurement, or conversations of the data set chat",
        unset="4 for each stream, 30 seconds of an open loop, at least 16; all of a trace",
        group="load",
        common=True,
        kind=int,
        low=1,
    )
    warmup: int | None = option(
        None,
        "requests before the first measurement, which aren't measured",
        unset="as many as streams, 16 at most",
        group="load",
        kind=int,
        low=0,
    )
    seed: int = option(
        0, "seed of prompts, lengths, arrivals and cancellations", group="load", kind=int
    )

    goodput: tuple[str, ...] = option(
        (),
        "limits in ms that a request keeps to count as good: ttft:500 tpot:50 e2el:5000",
        group="results",
        page="benchmarking#The figures",
        common=True,
        metavar="NAME:MS",
        repeatable=True,
        form=(rf"({'|'.join(_LIMITS)}):\d+(\.\d+)?", "ttft:MS, tpot:MS or e2el:MS"),
    )
    json: str | None = option(
        None,
        "file to write figures, options, versions and machine to",
        group="results",
        common=True,
        metavar="FILE",
    )
    records: bool = option(
        False, "with --json: write every request's times and text, too", group="results", kind=bool
    )
    plots: str | None = option(
        None,
        "folder to write plots to, as PNG; needs the extra bench",
        group="results",
        common=True,
        metavar="FOLDER",
    )
    html: str | None = option(
        None,
        "file to write figures and plots to, as one page; needs the extra bench",
        group="results",
        common=True,
        metavar="FILE",
    )

    def __attrs_post_init__(self) -> None:
        ways = {
            "concurrency": bool(self.concurrency),
            "request_rate": bool(self.request_rate),
            "trace": self.trace is not None,
        }
        given = [name for name, there in ways.items() if there]
        if len(given) > 1:
            raise _refuse(given[1], f"can't be given with {flag_name(given[0])}")
        self._check_infinite()
        self._check_trace()
        self._check_needs()
        self._check_streams()
        self._check_headers()
        for name in ("cancel_seconds", "cancel_events"):
            value = getattr(self, name)
            if len(value) > 2 or list(value) != sorted(value):
                raise _refuse(name, "must be one number, or two in ascending order")
        if self.cancel_seconds and self.cancel_events:
            raise _refuse("cancel_events", "can't be given with --cancel-seconds")
        _ = self.extra_fields

    def _check_infinite(self) -> None:
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            numbers = value if one.repeatable else (value,)
            if one.kind is float and math.inf in numbers and one.name != "request_rate":
                raise _refuse(one.name, "must be a finite number; got inf")
        if math.inf in self.request_rate:
            if len(self.request_rate) > 1:
                raise _refuse(
                    "request_rate", "inf can't be measured with other rates: give it alone"
                )
            if self.num_prompts is None:
                raise _refuse("request_rate", "inf needs --num-prompts, since all are sent at once")

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        for name in _REPLACED_BY_A_TRACE:
            if self._changed(name):
                raise _refuse(
                    name, "can't be given with --trace, which has its own prompts and lengths"
                )

    def _check_needs(self) -> None:
        """Refuse options that would have no effect."""
        lengths = self.dataset not in ("sharegpt", "json") and self.prompt is None
        made_here = "generated prompts, not --prompt or --dataset sharegpt or json"
        needs = (
            ("engine_option", self.embedded is not None, "--embedded"),
            ("arrivals", bool(self.request_rate), "--request-rate"),
            ("max_concurrency", bool(self.request_rate or self.trace), "--request-rate or --trace"),
            ("trace_unit", self.trace is not None, "--trace"),
            ("trace_speed", self.trace is not None, "--trace"),
            ("trace_scale", self.trace is not None, "--trace"),
            ("data", self.dataset == "sharegpt", "--dataset sharegpt"),
            ("json_schema", self.dataset == "json", "--dataset json"),
            ("prompt", self.dataset == "fixed", "--dataset fixed"),
            ("input_tokens", lengths, made_here),
            ("range_ratio", lengths, made_here),
            ("prefix_tokens", lengths, made_here),
            ("prefix_groups", self.dataset == "shared-prefix", "--dataset shared-prefix"),
            ("records", self.json is not None, "--json"),
            ("cancel_seconds", self.cancel_rate > 0, "--cancel-rate above 0"),
            ("cancel_events", self.cancel_rate > 0, "--cancel-rate above 0"),
            ("turns", self.dataset in ("chat", "sharegpt"), "--dataset chat or sharegpt"),
            ("think_time", self.dataset == "chat", "--dataset chat"),
            *(
                (name, self.embedded is None, "a server, not --embedded")
                for name in ("model", "api_key", "header", "ca_file", "insecure")
            ),
        )
        for name, there, needed in needs:
            if self._changed(name) and not there:
                raise _refuse(name, f"needs {needed}")
        if self.dataset == "sharegpt" and self.data is None:
            raise _refuse("data", "must be given with --dataset sharegpt")

    def _check_streams(self) -> None:
        """Refuse more streams than prompts, because the results would count idle streams."""
        most = max(self.concurrency, default=0)
        if self.num_prompts is not None and self.num_prompts < most:
            raise _refuse("num_prompts", f"must be at least {most}, one for each stream")

    def _check_headers(self) -> None:
        names: set[str] = {"authorization"} if self.api_key is not None else set()
        for header in self.header:
            name = header.partition(":")[0].lower()
            if not header.isprintable():
                raise _refuse("header", f"{name} must be one line of printable characters")
            if name in names and name == "authorization":
                raise _refuse("header", "authorization can't be given twice, or with --api-key")
            if name in names:
                raise _refuse("header", f"{name} can't be given twice")
            names.add(name)

    def _changed(self, name: str) -> bool:
        """Return True if an option isn't at its default."""
        default: object = getattr(attrs.fields(BenchOptions), name).default
        return bool(getattr(self, name) != default)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields of ``--extra-body``.

        Raises:
            InvalidRequest: The option isn't a JSON object.
        """
        if self.extra_body is None:
            return {}
        try:
            fields = json.loads(self.extra_body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise _refuse("extra_body", f"must be a JSON object; got {self.extra_body!r}")
        return fields

    @property
    def limits(self) -> Mapping[str, float]:
        """Limits of ``--goodput`` by name, in milliseconds."""
        pairs = (text.split(":") for text in self.goodput)
        return {name: float(limit) for name, limit in pairs}


def _refuse(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {message}", param=name)
