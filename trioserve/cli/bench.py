"""``trioserve bench``: measure a server or an engine, and report the results."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import attrs
import rich.console
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.bench_points import is_chat, points_of, read_trace, streams_of
from trioserve.cli.bench_results import BenchResults, check_outputs, note
from trioserve.cli.bench_work import make_texts
from trioserve.cli.loading import LoadingReport
from trioserve.cli.output import writing
from trioserve.cli.remote import address_of, authorization, certificates
from trioserve.config import EngineConfig
from trioserve.config.options import options_of
from trioserve.engine.nursery import open_engine
from trioserve.load.client import Target
from trioserve.load.embedded import EmbeddedTarget
from trioserve.load.figures import Limits
from trioserve.load.loop import Progress
from trioserve.load.measure import Measured, MeasureError, Point, measure, warm_up
from trioserve.load.progress import ProgressBar
from trioserve.load.report import environment, figures_text, summary_text
from trioserve.load.server import ask_models
from trioserve.load.target import AnyTarget
from trioserve.load.texts import CountedTexts, Texts
from trioserve.load.traces import TraceRow
from trioserve.load.work import Conversation
from trioserve.protocol.log_output import escaped
from trioserve.protocol.wire import MockSteps


@attrs.frozen(kw_only=True)
class _BenchTarget:
    """The server or engine that is measured, and facts about it for the results."""

    target: AnyTarget
    model: str
    texts: Texts
    facts: Mapping[str, Any]


def run_bench(
    options: BenchOptions, engine: EngineConfig | None, mock: MockSteps | None = None
) -> int:
    """Measure, report, and return the exit code.

    Args:
        options: The options.
        engine: Configuration of an embedded engine; None to measure a server.
        mock: Step times of an embedded engine's mock worker; None for a real worker.

    Raises:
        UsageError: A file or URL of an option can't be used.
        TrioserveError: Nothing could be measured, or the results can't be written.
    """
    check_outputs(options)
    trace = read_trace(options)
    results = BenchResults(options)
    try:
        trio.run(_measure_all, results, trace, engine, mock)
    finally:
        # Also after Ctrl-C or a failure, so that earlier points aren't lost.
        results.write()
    if len(results.measured) > 1:
        with writing():
            print(escaped(summary_text(results.measured), keep="\n\t"), flush=True)
    return _exit_code(results.measured)


def _exit_code(measured: Sequence[Measured]) -> int:
    empty = [one for one in measured if not one.figures.completed]
    for one in empty:
        if not one.figures.failed:
            note(f"{one.label}: nothing could be measured, since every client left early")
    return 1 if empty or any(one.figures.failed for one in measured) else 0


async def _measure_all(
    results: BenchResults,
    trace: Sequence[TraceRow],
    engine: EngineConfig | None,
    mock: MockSteps | None,
) -> None:
    options = results.options
    chat = is_chat(options, trace)
    opened = _server(options, chat) if engine is None else _embedded(options, chat, engine, mock)
    async with opened as bench_target:
        results.facts = {
            "tool": "trioserve bench",
            **environment("torch", "tokenizers"),
            "options": _without_keys(options),
            "target": {**bench_target.facts, "model": bench_target.model},
            "exact_prompt_lengths": bench_target.texts.exact,
        }
        note(f"asking {bench_target.model} at {bench_target.facts['name']}")
        if not bench_target.texts.exact:
            note("no tokenizer: prompts are nearly as long as asked (see --tokenizer)")
        points, warm_ups = await _points(options, bench_target.texts, trace)
        results.planned = [point.label for point in points]
        await _warm_up(bench_target, warm_ups, max(streams_of(options)))
        # An embedded engine tunes the garbage collector itself.
        with _frozen_gc() if engine is None else contextlib.nullcontext():
            for point in points:
                results.measured.append(await _measure_point(options, bench_target, point))


async def _points(
    options: BenchOptions, texts: Texts, trace: Sequence[TraceRow]
) -> tuple[list[Point], list[Conversation]]:
    """Make all prompts in a thread, so that Ctrl-C works and a terminal shows the progress."""
    with rich.console.Console(stderr=True).status("making prompts"):
        return await trio.to_thread.run_sync(
            points_of, options, texts, trace, abandon_on_cancel=True
        )


async def _warm_up(bench_target: _BenchTarget, work: Sequence[Conversation], streams: int) -> None:
    try:
        await warm_up(bench_target.target, work, streams, texts=bench_target.texts)
    except MeasureError as error:
        if "ignore_eos" in str(error):
            raise MeasureError(f"{error} (--no-ignore-eos leaves it out)") from error
        raise


@contextlib.contextmanager
def _frozen_gc() -> Iterator[None]:
    """Freeze the existing objects for the block, so that the garbage collector skips them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _measure_point(
    options: BenchOptions, bench_target: _BenchTarget, point: Point
) -> Measured:
    """Measure one point and print its figures.

    Raises:
        MeasureError: The server reports no token counts.
    """
    progress = Progress()
    limits = Limits(**options.limits) if options.goodput else None
    measured: list[Measured] = []
    try:
        with ProgressBar(point.label, progress) as bar:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bar.follow)
                measured.append(
                    await measure(
                        bench_target.target,
                        point,
                        limits=limits,
                        texts=bench_target.texts,
                        progress=progress,
                    )
                )
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise sole_exception(group) from group
    with writing():
        print(escaped(figures_text(measured[0]), keep="\n\t") + "\n", flush=True)
    return measured[0]


# -- the server or engine to measure


@contextlib.asynccontextmanager
async def _server(options: BenchOptions, chat: bool) -> AsyncIterator[_BenchTarget]:
    _raise_file_limit()
    address = address_of(options.url, instead="--api-key or --header 'Authorization:Basic ...'")
    context = certificates(address, options.ca_file, insecure=options.insecure)
    connect = address.connect(context)
    headers = _headers(options)
    info = await ask_models(
        connect, address.authority, f"{address.base_path}/models", headers, address.url
    )
    model = options.model or next(iter(info.models), None)
    if model is None:
        raise MeasureError(f"{address.url} lists no models: give --model")
    target = Target(
        connect=connect,
        host=address.authority,
        path=address.base_path + ("/chat/completions" if chat else "/completions"),
        fields={"model": model, "stream_options": {"include_usage": True}, **_fields(options)},
        headers=headers,
        timeout=options.request_timeout,
    )
    yield _BenchTarget(
        target=target,
        model=model,
        texts=await _texts(options, model),
        facts={"name": address.url, "path": target.path, "software": info.software},
    )


def _raise_file_limit() -> None:
    """Raise the limit of open files, usually 1,024, to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # Some systems allow less than the limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _headers(options: BenchOptions) -> dict[str, str]:
    """Return the headers by name in title case, because names ignore case."""
    pairs = (header.split(":", 1) for header in options.header)
    headers = {name.title(): value.strip() for name, value in pairs}
    if "Authorization" in headers:
        return headers
    return {**authorization(options.api_key), **headers}


@contextlib.asynccontextmanager
async def _embedded(
    options: BenchOptions, chat: bool, config: EngineConfig, mock: MockSteps | None
) -> AsyncIterator[_BenchTarget]:
    with LoadingReport() as report:
        async with open_engine(config, on_progress=report, mock=mock) as engine:
            report.close()
            texts: Texts = CountedTexts(engine.tokenizer.backend)
            if options.tokenizer is not None:
                texts = await _texts(options, config.model)
            target = EmbeddedTarget(
                engine=engine,
                chat=chat,
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
            yield _BenchTarget(target=target, model=engine.model_name, texts=texts, facts=facts)


def _changed(config: EngineConfig) -> dict[str, Any]:
    """Return the engine's options that aren't at their defaults."""
    return {
        option.name: value
        for option in options_of(EngineConfig)
        if (value := getattr(config, option.name)) != option.default and not option.secret
    }


def _fields(options: BenchOptions) -> dict[str, Any]:
    """Return the fields of every request."""
    fields: dict[str, Any] = {"temperature": options.temperature}
    ends = options.trace is None and (options.dataset == "json" or options.prompt is not None)
    if not ends if options.ignore_eos is None else options.ignore_eos:
        fields["ignore_eos"] = True
    return {**fields, **options.extra_fields}


async def _texts(options: BenchOptions, model: str) -> Texts:
    return await trio.to_thread.run_sync(make_texts, options, model)


# -- results


def _without_keys(options: BenchOptions) -> dict[str, Any]:
    """Return the options without keys, for the results."""
    secret = {option.name for option in options_of(BenchOptions) if option.secret}
    return {name: value for name, value in attrs.asdict(options).items() if name not in secret}
