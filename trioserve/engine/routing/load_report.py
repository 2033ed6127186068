"""Reports of workers' loads, from which another process predicts times as the router here does."""

from __future__ import annotations

import msgspec

from trioserve.engine.routing.policy import WorkerLoad
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.step_time import StepTimeModel


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a worker at one moment, without what its cache has of a prompt."""

    worker: int
    """Number of the worker."""
    serves: bool = False
    """True if it is there and computes."""
    is_known: bool = False
    """True if it has computed enough steps to predict others."""
    coefficients: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Seconds for a step, a decode, a token of a prompt, and a token of context."""
    prompt_tokens: int = 0
    """Tokens of prompts to be computed."""
    num_prompts: int = 0
    """Number of those prompts."""
    num_decodes: int = 0
    """Sequences that decode."""
    context: int = 0
    """Tokens of context that a step of those reads."""
    num_free: int = 0
    """Free slots, less the sequences that wait for one."""
    max_tokens: int = 1
    """Most tokens of a step."""
    itl_target: float | None = None
    """Target for the gap between two tokens, in seconds."""

    def model(self) -> StepTimeModel:
        """Return the model of its steps' times."""
        return _ReportedTimes(self.coefficients, self.is_known)

    def load(
        self,
        model: StepTimeModel,
        *,
        cached: int,
        cached_on_host: int,
        prompt_tokens: int,
        num: int,
    ) -> WorkerLoad:
        """Return the load as it matters for one request.

        Args:
            model: The result of :meth:`model`.
            cached: Tokens of the prompt in the worker's cache.
            cached_on_host: Tokens behind those in the host's memory.
            prompt_tokens: Tokens of prompts that were sent to it after the report.
            num: Number of those prompts.
        """
        return WorkerLoad(
            model=model,
            cached=cached,
            cached_on_host=cached_on_host,
            prompt_tokens=self.prompt_tokens + prompt_tokens,
            num_prompts=self.num_prompts + num,
            num_decodes=self.num_decodes,
            context=self.context,
            num_ahead=max(1 - self.num_free + num, 0),
            max_tokens=self.max_tokens,
            itl_target=self.itl_target,
        )


class _ReportedTimes(StepTimeModel):
    """Times of steps that were learned in another process."""

    def __init__(self, coefficients: tuple[float, ...], is_known: bool) -> None:
        super().__init__()
        self.coefficients = list(coefficients)
        self._is_known = is_known

    @property
    def is_known(self) -> bool:
        """True if there were enough steps to predict others."""
        return self._is_known


def load_report(scheduler: Scheduler) -> LoadReport:
    """Return the report of a scheduler's worker."""
    core = scheduler.core
    if core is None:
        return LoadReport(worker=scheduler.index, serves=scheduler.attached)
    num_decodes, context, num_prefills, prefill_tokens = _running(core)
    fixed, decode, token, read = core.step_times.coefficients
    return LoadReport(
        worker=scheduler.index,
        serves=scheduler.attached and not scheduler.paused,
        is_known=core.step_times.is_known,
        coefficients=(fixed, decode, token, read),
        prompt_tokens=core.num_waiting_tokens - core.num_waiting_cached + prefill_tokens,
        num_prompts=core.num_waiting + num_prefills,
        num_decodes=num_decodes,
        context=context,
        num_free=core.memory.slots.num_free - core.num_waiting,
        max_tokens=core.limits.max_num_batched_tokens,
        itl_target=core.limits.itl_target,
    )


def _running(core: SchedulerCore) -> tuple[int, int, int, int]:
    """Return the number of decodes and their context, and that of prefills and their tokens."""
    counts, slots = core.memory.counts, core.running.slots
    decodes = counts.decodes[slots]
    lengths = counts.length[slots]
    missing = (lengths - counts.planned[slots])[~decodes]
    return (
        int(decodes.sum()),
        int(lengths[decodes].sum()),
        len(missing),
        int(missing.sum()),
    )
