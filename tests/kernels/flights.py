"""Plans for a small model with one or more in flight, and what each gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from gpu.kernels import KernelLoader
from tests.kernels.serving import NUM_PAGES, PAGE_SIZE, Server
from tests.support.plans import PlanMaker
from trioserve.protocol.wire import StepResult

__all__ = ["Flight"]


@attrs.frozen(kw_only=True)
class Flight:
    """Plans in their order."""

    opened: dict[int, dict[str, Any]]
    """Slot -> what it is opened with, in the first plan that has a row of it."""
    plans: list[dict[int, int]]
    copied_in: int | None = None
    """The plan in which a page of slot 0 goes to the host, is written over, and comes back."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """Options of the server, see :meth:`Server.of`."""

    def serve(self, folder: Path, loader: KernelLoader, **more: Any) -> Server:
        """Load the model."""
        options = {"num_host_pages": 2, **self.options, **more}
        return Server.of(folder, loader, graphs=True, **options)

    def run(self, server: Server, *, in_flight: int) -> list[StepResult]:
        """Run all plans; the results, without times."""
        runner = server.runner
        runner.reset(1)
        maker = PlanMaker(runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        results = []

        def finish() -> None:
            results.append(runner.finish())
            maker.accept(results[-1])

        for index, rows in enumerate(self.plans):
            if not runner.accepts or runner.num_pending == in_flight:
                finish()
            for slot in rows.keys() - maker.slots.keys():
                maker.open(slot, **self.opened[slot])
            if index == self.copied_in:
                first, second = maker.slots[0].pages[:2]
                maker.copies += [(first, NUM_PAGES), (second, first), (NUM_PAGES, first)]
            runner.submit(maker.plan(rows))
        while runner.num_pending:
            finish()
        untimed: dict[str, Any] = {"step_us": 0, "gap_us": 0, "idle_us": 0, "launch_us": 0}
        return [attrs.evolve(result, **untimed) for result in results]
