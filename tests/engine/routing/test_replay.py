"""The replay of traces: simulated workers keep the books, and the predicted times pay."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.engine.routing.replay import BLOCK, FIXED, POLICIES, TOKEN, Asked, Worker, read, replay


def chats(count: int) -> list[Asked]:
    """Return the turns of conversations that share a system prompt, in the order of arrival."""
    rng = random.Random(1)
    asked: list[Asked] = []
    for chat in range(count):
        at, blocks = rng.uniform(0, 30), [0, 1]
        for turn in range(5):
            blocks += [1000 * chat + 10 * turn + each for each in range(10, 10 + rng.randrange(9))]
            asked.append(Asked(at, len(blocks) * BLOCK - 7, rng.randrange(1, 300), tuple(blocks)))
            at += rng.uniform(4, 12)
    return sorted(asked, key=lambda each: each.at)


def test_one_request_takes_the_time_of_its_prompt() -> None:
    found = replay([Asked(1.0, 1000, 5, (1, 2))], 2, POLICIES["predicted"]())
    assert found["p50"] == pytest.approx(FIXED + 1000 * TOKEN, rel=0.05)
    assert found["hits"] == 0


@pytest.mark.parametrize("name", list(POLICIES))
def test_all_requests_are_computed_once(name: str) -> None:
    asked = chats(40)
    found = replay(asked, 3, POLICIES[name]())
    assert 0 < found["p50"] <= found["p90"] <= found["p99"]
    assert 0 < found["hits"] < 1
    worker, firsts = Worker(), [0.0] * len(asked)
    for index, each in enumerate(asked):
        worker.add(index, each)
    now: float | None = 0.0
    while now is not None:
        now = worker.run(now, firsts)
    assert (worker.prompt_tokens, worker.context, worker.ends) == (0, 0, [])


def test_predicted_times_are_the_shortest() -> None:
    asked = chats(150)
    found = {name: replay(asked, 4, make()) for name, make in POLICIES.items()}
    best = min(each["p90"] for name, each in found.items() if name != "predicted")
    assert found["predicted"]["p90"] <= 1.05 * best, found


def test_a_trace_is_read(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 500 * i, "input_length": 600, "output_length": i, "hash_ids": [i, 7]}
        for i in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path, 2.0, 3) == [
        Asked(0.0, 600, 1, (0, 7)), Asked(0.25, 600, 1, (1, 7)), Asked(0.5, 600, 2, (2, 7)),
    ]  # fmt: skip
