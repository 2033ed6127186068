"""Drafts and beams beside other servers': what is asked, and which answers don't count."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from bench.compare import __main__ as compare
from bench.compare import decoding
from bench.compare.decoding import Beams, Speculation, loops, paragraphs
from bench.compare.scenarios import InvalidRun, Setting, Taken
from bench.peers.servers import own_server
from bench.servers import Running
from trioserve.load.measure import Point

TASKS = {task: [(f"{task} {i}", 9 + i) for i in range(70)] for task in decoding.TASKS}


def test_loops_are_told_from_other_outputs() -> None:
    assert loops([1, 2, 3, 9, 9, 9])
    assert loops([0, 1, 2, 1, 2, 1, 2])
    assert not loops([1, 2, 3, 4, 1, 2, 3, 4, 5])
    assert not loops([])
    assert len(paragraphs()) > 30


def running(name: str) -> Running:
    server = own_server(Setting(drafts="text" if "drafts" in name else ""))
    assert server.name == name
    unused: Any = None
    return Running(server=server, target=unused, port=0, process=unused, started=0.0)


async def test_each_task_is_asked_with_prompts_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points: list[Point] = []

    async def take(point: Point, one: Running) -> Taken:
        points.append(point)
        return Taken(values={}, answers=["the same"])

    monkeypatch.setattr(decoding, "take", take)
    scenario = Speculation(tasks=TASKS)
    own = running("trioserve")
    for turn in itertools.chain(scenario.turns(0), scenario.turns(1)):
        await turn.measure(own)
    assert [len(point.work) for point in points[:12]] == [4] * 4 + [16] * 4 + [64] * 4
    first, second = ([each.turns[0] for each in points[n].work] for n in (0, 12))
    assert [each.max_tokens for each in first] == [9, 10, 11, 12]
    assert {each.prompt for each in first}.isdisjoint(each.prompt for each in second)
    salts = [point.work[0].turns[0].fields["cache_salt"] for point in points]
    assert len(set(salts)) == 24


async def test_drafts_that_change_an_answer_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Sequence[str]] = {"trioserve": ["a", "b"]}

    async def take(point: Point, one: Running) -> Taken:
        return Taken(values={}, answers=answers.get(one.server.name, ["a", "c"]))

    monkeypatch.setattr(decoding, "take", take)
    turn = Speculation(tasks=TASKS).turns(0)[0]
    await turn.measure(running("trioserve"))
    with pytest.raises(InvalidRun, match="drafts have changed an answer"):
        await turn.measure(running("trioserve, drafts by text"))


async def test_searches_must_give_all_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []

    def post(port: int, path: str, body: dict[str, Any]) -> Any:
        bodies.append(body)
        return {"choices": [{"text": "beam"}] * (4 if len(bodies) < 5 else 1)}

    monkeypatch.setattr(decoding, "post", post)
    (turn,) = Beams().turns(0)
    taken = await turn.measure(running("trioserve"))
    assert taken.answers == ["beam"] * 4
    assert [body["n"] for body in bodies] == [4] * 4
    assert bodies[0]["prompt"] != bodies[1]["prompt"]
    with pytest.raises(InvalidRun, match="1 beams"):
        await turn.measure(running("trioserve"))


def test_this_server_alone_drafts_from_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def make(name: str, setting: Setting) -> str:
        made.append((name, setting.drafts))
        return name

    async def known_tasks() -> dict[str, decoding.Task]:
        return TASKS

    servers = {name: partial(make, name) for name in ("", "llama.cpp", "vllm")}
    monkeypatch.setattr(compare, "SERVERS", servers)
    monkeypatch.setattr(compare, "known_tasks", known_tasks)
    (part,) = compare.decoding_parts(["speculation"], [], "a/student")
    assert part.title == "speculation_draft_model"
    assert made == [("", ""), ("", "text"), ("", "a/student")]
    made.clear()
    (part,) = compare.decoding_parts(["speculation"], ["vllm", "llama.cpp"], "")
    assert part.title == "speculation_peers"
    kinds = ("", "text", "model")
    wanted = [(name, kind) for name in ("", "vllm", "llama.cpp") for kind in kinds]
    assert made == [each for each in wanted if each != ("vllm", "model")]
