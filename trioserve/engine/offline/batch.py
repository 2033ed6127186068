"""Many prompts, completed together in the engine's thread, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import rich.console
import rich.progress
import trio

from trioserve.engine.engine import Engine
from trioserve.engine.offline.recording import Recording
from trioserve.engine.offline.room import Room
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, PromptLike
from trioserve.requests.prompts import ChatPrompt

Params = SamplingParams | Sequence[SamplingParams] | None


@attrs.frozen
class PromptBatch:
    """Prompts with the sampling parameters of each."""

    prompts: list[PromptLike]
    params: list[SamplingParams | None]
    options: dict[str, Any]
    """Further arguments of :meth:`trioserve.Engine.generate`, for all."""

    @classmethod
    def of(
        cls, prompts: PromptLike | Sequence[PromptLike], params: Params, options: dict[str, Any]
    ) -> PromptBatch:
        """Pair prompts with parameters: one for all, or one for each.

        Raises:
            ValueError: there are more of the one than of the other.
        """
        several = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            return cls(several, [params] * len(several), options)
        each = list(params)
        if len(each) != len(several):
            raise ValueError(f"{len(each)} sampling parameters for {len(several)} prompts")
        return cls(several, [*each], options)


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """Return a list of prompts, of one element if ``prompts`` is a single one.

    A single prompt is text, a prompt class, a list of ids or a list of messages.
    """
    if isinstance(prompts, (list, tuple)):
        first = prompts[0] if prompts else None
        if not isinstance(first, (int, Mapping)):
            return list(prompts)
    return [prompts]  # type: ignore[list-item]


def as_chats(
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    **fields: Any,
) -> list[PromptLike]:
    """Return conversations as prompts; ``messages`` is one or a list of several.

    ``fields`` are further ones of :class:`~trioserve.ChatPrompt`.
    """
    arguments = dict(chat_template_kwargs or {})
    if tools is not None:
        arguments["tools"] = [dict(tool) for tool in tools]
    several: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [ChatPrompt(messages=each, template_arguments=arguments, **fields) for each in several]


async def complete_all(
    engine: Engine, room: Room, batch: PromptBatch, show_progress: bool
) -> list[Completion]:
    """Complete all prompts together; return completions in their order.

    The first error ends all of them and is raised.
    """
    completions: list[Completion | None] = [None] * len(batch.prompts)
    failure: Exception | None = None
    with _progress_bar(show_progress) as bar:
        report = _progress_of(bar, len(batch.prompts))

        async def complete(index: int) -> None:
            nonlocal failure
            recording = Recording(lambda: None)
            prompt, params = batch.prompts[index], batch.params[index]
            try:
                completion = await recording.record(engine, room, prompt, params, batch.options)
            except Exception as error:
                failure = failure or error
                nursery.cancel_scope.cancel()
                return
            completions[index] = completion
            report(completion)

        async with trio.open_nursery() as nursery:
            for index in range(len(batch.prompts)):
                nursery.start_soon(complete, index)
    if failure is not None:
        raise failure
    return [completion for completion in completions if completion is not None]


def _progress_bar(show: bool) -> rich.progress.Progress:
    """Return a bar on stderr, which draws nothing unless ``show`` and stderr is a terminal."""
    console = rich.console.Console(stderr=True)
    return rich.progress.Progress(
        rich.progress.TextColumn("[progress.description]{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[speed]}"),
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=not (show and console.is_terminal),
    )


def _progress_of(bar: rich.progress.Progress, total: int) -> Callable[[Completion], None]:
    """Return a function that advances the bar by a completion."""
    task = bar.add_task("Generating", total=total, speed="")
    started = trio.current_time()
    produced = 0

    def advance(completion: Completion) -> None:
        nonlocal produced
        produced += completion.usage.completion_tokens
        elapsed = max(trio.current_time() - started, 1e-9)
        bar.update(task, advance=1, speed=f"{produced / elapsed:.1f} tokens/s")

    return advance
