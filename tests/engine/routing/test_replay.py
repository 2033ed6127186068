"""The replay of traces: simulated workers keep the books, and the predicted times pay."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from tests.engine.routing.peer_routers import own_router, replay_through, text_of
from tests.engine.routing.replay import (
    BLOCK,
    FIXED,
    POLICIES,
    TOKEN,
    Asked,
    Choose,
    Simulation,
    Worker,
    endless_hits,
    read,
    replay,
    speed_for,
)


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


@pytest.mark.parametrize(
    ("count", "prefix", "own"), [(24, 12, 1), (8, 40, 1), (32, 4, 4), (64, 2, 1), (4, 60, 1)]
)
def test_requests_that_arrive_together_with_a_common_prefix(
    count: int, prefix: int, own: int
) -> None:
    """They wait for one worker to compute it, or have others compute it, too, if that is sooner."""
    before, instant = chats(40), 1000.0
    common = tuple(range(10**6, 10**6 + prefix))
    together = [
        Asked(instant, (prefix + own) * BLOCK, 20, (*common, *range(start, start + own)))
        for start in range(2 * 10**6, 2 * 10**6 + 100 * count, 100)
    ]

    def computed_by(choose: Choose) -> tuple[float, float]:
        """Return the mean time to the first token, and the tokens that were cached."""
        simulation = Simulation([*before, *together], [Worker() for _ in range(4)])
        turns = POLICIES["round_robin"]()
        for index, asked in enumerate(simulation.trace):
            simulation.until(asked.at)
            chosen = turns if asked.at < instant else choose
            simulation.add(index, chosen(simulation.workers, asked))
        simulation.until(math.inf)
        return sum(simulation.firsts[-count:]) / count, simulation.figures()["hits"]

    on_one, one_hits = computed_by(lambda workers, asked: 0)
    on_all, all_hits = computed_by(POLICIES["round_robin"]())
    chosen, hits = computed_by(POLICIES["predicted"]())
    assert chosen <= 1.15 * min(on_one, on_all)
    assert all_hits <= hits <= one_hits


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


def test_one_endless_cache_is_the_limit() -> None:
    asked = chats(40)
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for each in asked:
        prefixes = [each.blocks[: i + 1] for i in range(len(each.blocks))]
        known = [len(prefix) for prefix in prefixes if prefix in seen]
        hits += min(max(known, default=0) * BLOCK, each.prompt - 1)
        seen.update(prefixes)
    assert endless_hits(asked) == hits / sum(each.prompt for each in asked)
    assert replay(asked, 1, POLICIES["round_robin"]())["hits"] <= endless_hits(asked)


def test_a_load_is_a_share_of_the_highest_rate() -> None:
    at_once = [Asked(float(i), 2048, 1, (i,)) for i in range(40)]
    seconds = replay([Asked(0.0, 2048, 1, (0,))], 1, POLICIES["round_robin"]())["p50"]
    assert speed_for(at_once, 2, 0.5) == pytest.approx(0.5 * 39 / (20 * seconds), rel=0.01)


def test_texts_have_as_much_in_common_as_blocks() -> None:
    one = text_of(Asked(0.0, 3 * BLOCK - 9, 1, (1, 2, 3)))
    other = text_of(Asked(0.0, 2 * BLOCK, 1, (1, 2)))
    third = text_of(Asked(0.0, 2 * BLOCK, 1, (1, 4)))
    assert len(one) == 4 * (3 * BLOCK - 9)
    assert one.startswith(other)
    assert other[: 4 * BLOCK] == third[: 4 * BLOCK]
    assert other[4 * BLOCK :][:16] != third[4 * BLOCK :][:16]


async def test_the_router_of_servers_chooses_as_the_policy() -> None:
    asked = chats(8)
    found = await replay_through(own_router, asked, 3, settle=0.0)
    assert found == replay(asked, 3, POLICIES["predicted"]())
