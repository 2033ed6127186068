"""Reports of workers' loads, from which another process predicts times as the router here does."""

from __future__ import annotations

import msgspec

from trioserve.engine.routing.policy import WorkerLoad
from trioserve.engine.routing.worker_load import worker_load
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
        self, *, prompt_tokens: int, num: int, like: StepTimeModel | None = None
    ) -> WorkerLoad:
        """Return the load with requests that were sent to the worker after the report.

        Args:
            prompt_tokens: Tokens of their prompts.
            num: Number of those requests.
            like: Times of steps in place of the worker's own.
        """
        return WorkerLoad(
            model=like or self.model(),
            prompt_tokens=self.prompt_tokens + prompt_tokens,
            num_prompts=self.num_prompts + num,
            num_decodes=self.num_decodes,
            context=self.context,
            num_ahead=max(1 - self.num_free + num, 0),
            max_tokens=self.max_tokens,
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
    load = worker_load(core)
    fixed, decode, token, read = core.step_times.coefficients
    return LoadReport(
        worker=scheduler.index,
        serves=scheduler.attached and not scheduler.paused,
        is_known=core.step_times.is_known,
        coefficients=(fixed, decode, token, read),
        prompt_tokens=load.prompt_tokens,
        num_prompts=load.num_prompts,
        num_decodes=load.num_decodes,
        context=load.context,
        num_free=core.memory.slots.num_free - core.num_waiting,
        max_tokens=load.max_tokens,
        itl_target=core.limits.itl_target,
    )
