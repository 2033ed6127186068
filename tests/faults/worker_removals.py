"""Workers removed and added under load: does a client notice more than one prompt's computation?

``python -m tests.faults.worker_removals``. It is :mod:`.worker_kills` with ``DELETE /workers/N`` in
place of a loss: ``Engine.remove_worker``, then ``Engine.add_worker``, again and again under the
same load. The joined workers stay. With ``--apart`` the new worker is added before one is removed,
so that none is loaded during a pause.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.report import Made, run_script
from bench.servers import MODEL
from tests.faults.worker_kills import Scenario, figures_of, result_name


def measure(options: argparse.Namespace) -> Made:
    """Return the figures of workers that are removed."""
    scenario = Scenario(
        ways=("removed",), losses=options.removals, clients=options.clients, apart=options.apart
    )
    return figures_of(scenario, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove workers; return 1 if a request was lost or anything differs."""
    options = {"model": MODEL, "removals": 20, "clients": 6, "mock": False, "apart": False}
    name = result_name("faults_worker_removals", arguments)
    return run_script(name, measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
