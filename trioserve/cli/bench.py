"""``trioserve bench``: from its options to requests, and from what became of them to a report."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.bench_work import make_texts, make_work
from trioserve.cli.loading import LoadingReport
from trioserve.cli.output import writing
from trioserve.cli.usage import UsageError
from trioserve.config import EngineConfig
from trioserve.errors import TrioserveError
from trioserve.load.arrivals import arrivals, scaled_arrivals
from trioserve.load.client import Target
from trioserve.load.connect import Address, parse_url, tls_context
from trioserve.load.embedded import EmbeddedTarget
from trioserve.load.figures import Limits
from trioserve.load.loop import Progress
from trioserve.load.measure import Measured, MeasureError, Point, measure, warm_up
from trioserve.load.progress import ProgressBar
from trioserve.load.report import as_json, environment, figures_text, summary_text
from trioserve.load.server import ask_models
from trioserve.load.target import AnyTarget
from trioserve.load.texts import CountedTexts, Texts
from trioserve.load.traces import load_trace, trace_work
from trioserve.load.work import Conversation
from trioserve.nursery import open_engine
from trioserve.options import options_of
from trioserve.wire import MockSteps

__all__ = ["points_of", "run_bench"]

_STREAMS = 8
_PROMPTS_PER_STREAM = 4
_OPEN_LOOP_SECONDS = 30
_FEWEST_PROMPTS = 16
_MOST_WARM_UPS = 16


@attrs.frozen(kw_only=True)
class _Subject:
    """Whom to ask, and what is known of it."""

    target: AnyTarget
    model: str
    texts: Texts
    facts: Mapping[str, Any]


def run_bench(
    options: BenchOptions, engine: EngineConfig | None, mock: MockSteps | None = None
) -> int:
    """Measure, report, and return the exit code.

    Args:
        options: what the command line says.
        engine: the configuration of an embedded engine, where there is to be one.
        mock: for an embedded engine, the time that a worker takes which computes nothing.

    Raises:
        UsageError: a file or a URL that an option names can't be used.
        TrioserveError: nothing could be measured, or what was can't be written.
    """
    _check_outputs(options)
    measured, facts = trio.run(_measure_all, options, engine, mock)
    with writing():
        if len(measured) > 1:
            print(summary_text(measured), flush=True)
    _write(options, measured, facts)
    return 1 if any(one.figures.failed for one in measured) else 0


def _check_outputs(options: BenchOptions) -> None:
    """Find out before a long run that its results couldn't be written."""
    for flag, file in (("--json", options.json), ("--html", options.html)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise UsageError(f"{flag}: there is no folder {Path(file).absolute().parent}")
    for flag, given in (("--plots", options.plots), ("--html", options.html)):
        if given is not None:
            _need_matplotlib(flag)


def _need_matplotlib(flag: str) -> None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{flag} needs matplotlib: pip install 'trioserve[bench]'")


async def _measure_all(
    options: BenchOptions, engine: EngineConfig | None, mock: MockSteps | None
) -> tuple[list[Measured], dict[str, Any]]:
    opened = _server(options) if engine is None else _embedded(options, engine, mock)
    async with opened as subject:
        points, warm_ups = points_of(options, subject.texts)
        facts = {
            "tool": "trioserve bench",
            **environment("torch", "tokenizers"),
            "options": _told(options),
            "target": {**subject.facts, "model": subject.model},
            "exact_prompt_lengths": subject.texts.exact,
        }
        _note(f"asking {subject.model} at {subject.facts['name']}")
        if not subject.texts.exact:
            _note("no tokenizer: prompts are nearly as long as asked (see --tokenizer)")
        streams = max(options.concurrency or (_STREAMS,))
        await _warm_up(subject, warm_ups, streams)
        # An embedded engine chooses the collector's settings itself.
        with _collected() if engine is None else contextlib.nullcontext():
            return [await _one(options, subject, point) for point in points], facts


async def _warm_up(subject: _Subject, work: Sequence[Conversation], streams: int) -> None:
    try:
        await warm_up(subject.target, work, streams)
    except MeasureError as error:
        if "ignore_eos" in str(error):
            raise MeasureError(f"{error} (--no-ignore-eos leaves it out)") from error
        raise


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """What is there now stays: no collection in the midst of a run looks at it in vain."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _one(options: BenchOptions, subject: _Subject, point: Point) -> Measured:
    """Measure one point, and print its figures."""
    progress = Progress()
    limits = Limits(**options.limits) if options.goodput else None
    measured: list[Measured] = []
    with ProgressBar(point.label, progress) as bar:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bar.follow)
            measured.append(
                await measure(
                    subject.target, point, limits=limits, texts=subject.texts, progress=progress
                )
            )
            nursery.cancel_scope.cancel()
    with writing():
        print(figures_text(measured[0]) + "\n", flush=True)
    return measured[0]


# -- whom to ask


@contextlib.asynccontextmanager
async def _server(options: BenchOptions) -> AsyncIterator[_Subject]:
    _raise_file_limit()
    try:
        address = parse_url(options.url)
    except ValueError as error:
        raise UsageError(f"URL: {error}") from error
    connect = address.connect(_tls(options, address))
    headers = _headers(options)
    info = await ask_models(
        connect, address.authority, f"{address.base_path}/models", headers, address.url
    )
    model = options.model or next(iter(info.models), None)
    if model is None:
        raise MeasureError(f"{address.url} lists no models: give --model")
    chat = _is_chat(options)
    target = Target(
        connect=connect,
        host=address.authority,
        path=address.base_path + ("/chat/completions" if chat else "/completions"),
        fields={"model": model, "stream_options": {"include_usage": True}, **_fields(options)},
        headers=headers,
        timeout=options.request_timeout,
    )
    yield _Subject(
        target=target,
        model=model,
        texts=await _texts(options, model),
        facts={"name": address.url, "path": target.path, "software": info.software},
    )


def _raise_file_limit() -> None:
    """As many connections as the system lets a process have: the usual bound is 1,024 files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tls(options: BenchOptions, address: Address) -> Any:
    if not address.tls:
        for flag, given in (("--ca-file", options.ca_file), ("--insecure", options.insecure)):
            if given:
                raise UsageError(f"{flag} needs a URL that begins with https://")
        return None
    try:
        file = None if options.ca_file is None else Path(options.ca_file)
        return tls_context(file, insecure=options.insecure)
    except OSError as error:  # an SSLError, too
        raise UsageError(f"--ca-file: {options.ca_file} can't be used: {error}") from error


def _headers(options: BenchOptions) -> dict[str, str]:
    pairs = (header.split(":", 1) for header in options.header)
    headers = {name: value.strip() for name, value in pairs}
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}", **headers} if key else headers


@contextlib.asynccontextmanager
async def _embedded(
    options: BenchOptions, config: EngineConfig, mock: MockSteps | None
) -> AsyncIterator[_Subject]:
    with LoadingReport() as report:
        async with open_engine(config, on_progress=report, mock=mock) as engine:
            report.close()
            texts: Texts = CountedTexts(engine.tokenizer.backend)
            if options.tokenizer is not None:
                texts = await _texts(options, config.model)
            target = EmbeddedTarget(
                engine=engine,
                chat=_is_chat(options),
                fields=_fields(options),
                timeout=options.request_timeout,
            )
            facts = {
                "name": "an embedded engine",
                "device": engine.ready.device_name,
                "dtype": engine.ready.dtype,
                "mock": None if mock is None else attrs.asdict(mock),
                "engine_options": _changed(config),
            }
            yield _Subject(target=target, model=engine.model_name, texts=texts, facts=facts)


def _changed(config: EngineConfig) -> dict[str, Any]:
    """The engine's options that aren't the defaults."""
    return {
        option.name: value
        for option in options_of(EngineConfig)
        if (value := getattr(config, option.name)) != option.default and not option.secret
    }


def _is_chat(options: BenchOptions) -> bool:
    if options.endpoint != "auto":
        return options.endpoint == "chat"
    return options.trace is None and options.dataset in ("chat", "json")


def _fields(options: BenchOptions) -> dict[str, Any]:
    """What every request says."""
    fields: dict[str, Any] = {"temperature": options.temperature}
    ends = options.trace is None and (options.dataset == "json" or options.prompt is not None)
    if not ends if options.ignore_eos is None else options.ignore_eos:
        fields["ignore_eos"] = True
    return {**fields, **options.extra_fields}


async def _texts(options: BenchOptions, model: str) -> Texts:
    return await trio.to_thread.run_sync(make_texts, options, model)


# -- what to ask, and when


def points_of(options: BenchOptions, texts: Texts) -> tuple[list[Point], list[Conversation]]:
    """What is measured, and what is asked before. Every point has prompts of its own."""
    warm_ups = options.warmup
    if warm_ups is None:
        warm_ups = min(max(options.concurrency or (_STREAMS,)), _MOST_WARM_UPS)
    before = make_work(options, texts, warm_ups, point=-1) if warm_ups else []
    if options.trace is not None:
        return [_trace_point(options, texts)], before
    points = []
    for number, rate in enumerate(options.request_rate):
        count = options.num_prompts or max(math.ceil(_OPEN_LOOP_SECONDS * rate), _FEWEST_PROMPTS)
        points.append(
            Point(
                work=make_work(options, texts, count, point=number),
                arrivals=arrivals(options.arrivals, count, rate, options.seed + number),
                rate=rate,
                concurrency=options.max_concurrency,
            )
        )
    if not points:
        for number, streams in enumerate(options.concurrency or (_STREAMS,)):
            count = options.num_prompts or max(_PROMPTS_PER_STREAM * streams, _FEWEST_PROMPTS)
            work = make_work(options, texts, count, point=number)
            points.append(Point(work=work, concurrency=streams))
    return points, before


def _trace_point(options: BenchOptions, texts: Texts) -> Point:
    rows = load_trace(Path(str(options.trace)), unit=options.trace_unit, most=options.num_prompts)
    return Point(
        work=trace_work(rows, texts, seed=options.seed),
        arrivals=scaled_arrivals([row.at for row in rows], options.trace_speed),
        concurrency=options.max_concurrency,
    )


# -- what to tell


def _told(options: BenchOptions) -> dict[str, Any]:
    """The options as the results tell them: without keys."""
    secret = {option.name for option in options_of(BenchOptions) if option.secret}
    return {name: value for name, value in attrs.asdict(options).items() if name not in secret}


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(options: BenchOptions, measured: Sequence[Measured], facts: Mapping[str, Any]) -> None:
    try:
        if options.json is not None:
            data = as_json(measured, facts, records=options.records)
            Path(options.json).write_bytes(data)
            _note(f"wrote {options.json}")
        if options.plots is not None or options.html is not None:
            _draw(options, measured, facts)
    except OSError as error:
        raise TrioserveError(f"{error.filename} can't be written: {error.strerror}") from error


def _draw(options: BenchOptions, measured: Sequence[Measured], facts: Mapping[str, Any]) -> None:
    # matplotlib isn't there in every installation, and takes a second to load.
    from trioserve.load.report_html import page
    from trioserve.load.report_plots import plots, save_plots

    drawn = list(plots(measured))
    if options.plots is not None:
        for path in save_plots(drawn, Path(options.plots)):
            _note(f"wrote {path}")
    if options.html is not None:
        Path(options.html).write_text(page(measured, drawn, facts), encoding="utf-8")
        _note(f"wrote {options.html}")
