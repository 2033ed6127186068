"""What scenarios ask, and what is noted of the servers that they are measured on."""

from __future__ import annotations

from typing import Any

import pytest

from bench import cpu_after_leave, shared_prefix, throughput
from bench.contest import Notes
from bench.cpu_after_leave import CpuAfterLeave
from bench.memory import Memory
from bench.prompts import exact_prompts
from bench.servers import Server
from bench.shared_prefix import SharedPrefix
from bench.throughput import Throughput


def test_a_server_may_be_started_otherwise_for_another_scenario() -> None:
    notes = Notes()
    for scenario, option in ((Throughput(), "--wide"), (Memory(), "--narrow")):
        server = Server(
            name="peer",
            format="bf16",
            argv=lambda port, option=option: ["program", option],
            fields={},
            versions={"made": "today"},
        )
        notes.know(server, [scenario])
    assert notes.versions["peer bf16"] == {
        "made": "today",
        "started_with": {"throughput": "--wide", "memory": "--narrow"},
    }


def test_no_scenario_asks_what_another_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their prompts don't even begin alike, since servers keep what they have computed."""
    asked: list[str] = []

    def note(*arguments: Any, **options: Any) -> list[str]:
        found = exact_prompts(*arguments, **options)
        # Those of one call may share a prefix, by intention.
        asked.append(found[0][:40])
        return found

    for module in (throughput, shared_prefix, cpu_after_leave):
        monkeypatch.setattr(module, "exact_prompts", note)
    for scenario in (Throughput(streams=(1, 3)), SharedPrefix(requests=4), CpuAfterLeave()):
        scenario.warm_up()
        for round in range(3):
            scenario.turns(round)
    assert len(asked) == len(set(asked)) == 16
