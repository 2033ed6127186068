"""Scenarios drawn from a seed. Faults are made likely: little memory, short queues."""

from __future__ import annotations

import random
from typing import Any

import attrs

from trioserve.protocol.grammar import Grammar
from trioserve.requests.retention import Retention, RetentionRange
from trioserve.testing.simulation.expected import ids_of
from trioserve.testing.simulation.scenario import (
    AdapterChange,
    Departure,
    Fault,
    Pause,
    Scenario,
    SessionUse,
    SimulatedClient,
    WorkerKind,
    seed_of,
)

STEP = 0.01
POISONED = 0.1
CROWDED = 0.2
FIRST_RAGGED = 1000
"""First seed of the range in which half of the scenarios have workers with several tokens a row."""
REFUSED_GRAMMAR = "refused"
"""Text of a grammar that every worker refuses."""

_ALPHABETS = ("ab", "abc .", "ab\u00e9", "a\U0001f600 ", "\u00e9\U0001f600\u4e2d", "abcdefgh!")
_EOS = "!"
_STOPS = ("a", "ab", "aba", "abab", "b a", "bb", "\u00e9", "\U0001f600", "c.", "aaaa")
_PROMPTS = ("abcabcabcabcabcabc", "aaaaaaaaaaaaaaaaaa", "once upon a time ab")
_SECONDS = (0.0, STEP / 2, STEP, 3 * STEP, 10 * STEP, 1.0)


def draw_scenario(seed: int) -> Scenario:
    """Return the scenario of ``seed``."""
    choose = random.Random(seed)
    worker = _worker(choose)
    count = choose.choice((1, 2, 3, 5, 8, 12, 20))
    span = choose.choice((0.0, 0.05, 0.3))
    clients = [_client(choose, number, worker, span) for number in range(count)]
    if choose.random() < CROWDED:
        clients = _crowd(choose, clients)
    faults = _faults(choose)
    options = _options(choose)
    if choose.random() < POISONED:
        # A client that kills every worker that runs it. The engine has to find it before it gives
        # up.
        poisoned = choose.randrange(count)
        clients[poisoned] = _poisonous(clients[poisoned])
        faults = []
        options["max_worker_restarts"] = 3
    worker = _with_host_pages(random.Random(f"host {seed}"), worker)
    worker = _with_drafts(random.Random(f"drafts {seed}"), worker, seed)
    clients = _with_retention(random.Random(f"retention {seed}"), clients)
    clients = _with_tenants(random.Random(f"tenants {seed}"), clients)
    clients = _with_sessions(random.Random(f"sessions {seed}"), clients)
    adapters, clients = _with_adapters(random.Random(f"adapters {seed}"), clients, span, options)
    return Scenario(
        seed=seed,
        options=options,
        worker=worker,
        clients=tuple(clients),
        faults=tuple(faults),
        pauses=_pauses(random.Random(f"pauses {seed}"), span),
        adapters=adapters,
        eos_token_ids=ids_of(_EOS),
        ends=choose.choice(("idle", "idle", "idle", "drain", "abort", "cancel")),
        ends_at=choose.uniform(0, span + 0.6),
    )


def _worker(choose: random.Random) -> WorkerKind:
    page_size = choose.choice((1, 2, 4, 8))
    num_pages = choose.randint(36, 72) // page_size + choose.choice((1, 1, 2, 40))
    shrinks = choose.random() < 0.05
    return WorkerKind(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=choose.choice((48, 64, 256)),
        max_num_batched_tokens=choose.choice((1, 3, 8, 16, 64)),
        alphabet=tuple(dict.fromkeys(ids_of(choose.choice(_ALPHABETS)))),
        nothing_in=choose.choice((0, 0, 0, 0, 40)),
        computes_past_stop=choose.random() < 0.5,
        step_time=choose.choice((0.0, STEP, STEP, STEP)),
        seconds_per_token=choose.choice((0.0, 0.0, STEP / 10)),
        call_time=choose.choice((0.0, STEP, 5 * STEP, 3.0)),
        load_time=choose.choice((0.0, 0.1, 2.0)),
        link_delay=choose.choice((0.0, 0.0, STEP / 3)),
        pages_after_loss=max(1, num_pages // 2) if shrinks else None,
    )


def _with_host_pages(choose: random.Random, worker: WorkerKind) -> WorkerKind:
    """Give half of the workers some host memory, mostly too little."""
    if choose.random() < 0.5:
        return worker
    return attrs.evolve(worker, num_host_pages=choose.choice((1, 4, worker.num_pages, 1000)))


def _with_drafts(choose: random.Random, worker: WorkerKind, seed: int) -> WorkerKind:
    """Return the same worker, or from :data:`FIRST_RAGGED` on one that drafts tokens."""
    if seed < FIRST_RAGGED or choose.random() < 0.5:
        return worker
    return attrs.evolve(worker, max_row_tokens=choose.choice((2, 3, 5, 8)))


def _options(choose: random.Random) -> dict[str, Any]:
    return {
        "seed": 0,
        "max_num_seqs": choose.choice((1, 2, 3, 8)),
        "max_plans_in_flight": choose.choice((1, 1, 2, 2, 3)),
        "max_num_queued_reqs": choose.choice((4, 12, 2048, 2048, 2048)),
        "max_num_queued_tokens": choose.choice((None, None, None, None, 100)),
        "default_timeout": choose.choice((None, None, None, None, None, None, 0.25)),
        "scheduling_policy": choose.choice(("fcfs", "fcfs", "fcfs", "lpm", "priority")),
        "capacity_policy": choose.choice(
            ("max_utilization", "max_utilization", "guaranteed_no_evict")
        ),
        "enable_prefix_caching": choose.random() < 0.5,
        "max_stream_bytes": choose.choice((1024, 1 << 20)),
        "max_total_stream_bytes": choose.choice((2048, 256 << 20)),
        "grammar_timeout": 1.0,
        "max_worker_restarts": choose.choice((0, 3, 3, 3, 8, 8)),
        "watchdog_timeout": 5.0,
    }


def _client(choose: random.Random, number: int, worker: WorkerKind, span: float) -> SimulatedClient:
    return SimulatedClient(
        number=number,
        arrives=choose.choice((0.0, choose.uniform(0, span))),
        prompt=(prompt := _prompt(choose)),
        params=_params(choose, number, long=isinstance(prompt, str) and len(prompt) > 100),
        priority=choose.randint(0, 2),
        cache_salt=choose.choice(("", "", "", "salt")),
        timeout=choose.choice((None, None, None, None, choose.choice(_SECONDS))),
        leaves=_departure(choose) if choose.random() < 0.35 else None,
        pause=choose.choice((0.0, 0.0, 0.0, STEP / 2, 5 * STEP, 1.0)),
    )


def _prompt(choose: random.Random) -> Any:
    beginning = choose.choice(_PROMPTS)[: choose.randint(1, 18)]
    text = beginning + "".join(choose.choices("abc", k=choose.choice((0, 0, 1, 5))))
    match choose.randrange(8):
        case 0:
            # long enough to be encoded in a thread
            return (text * 2500)[: choose.randint(2001, 2500)]
        case 1:
            return ({"role": "user", "content": text},)
        case 2 | 3 | 4:
            return ids_of(text)
        case _:
            return text


def _crowd(choose: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Return the same clients with a common beginning of their prompts, at nearly the same time."""
    beginning = "".join(choose.choices("ab", k=choose.randint(4, 30)))
    return [
        attrs.evolve(
            client,
            arrives=choose.choice((0.0, 0.0, STEP, 3 * STEP)),
            prompt=(*ids_of(beginning), *ids_of("".join(choose.choices("abc", k=3)))),
            cache_salt="",
        )
        for client in clients
    ]


def _params(choose: random.Random, number: int, *, long: bool) -> dict[str, Any]:
    max_tokens = choose.choice((0, 1, 2, 5, 10, 20, 30, 30))
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": seed_of(choose.choice((0, 0, 1, 2)), number),
        "n": choose.choice((1, 1, 1, 2, 3)),
    }
    if long:
        params["truncate_prompt_tokens"] = choose.randint(1, 18)
        params["truncation_side"] = choose.choice(("left", "right"))
    if choose.random() < 0.4:
        params["stop"] = tuple(choose.sample(_STOPS, choose.randint(1, 3)))
        params["include_stop_str_in_output"] = choose.random() < 0.3
    if choose.random() < 0.3:
        params["stop_token_ids"] = ids_of(choose.choice("abc"))
        params["include_stop_str_in_output"] = choose.random() < 0.3
    if choose.random() < 0.2:
        params["min_tokens"] = choose.randint(0, max_tokens)
    if choose.random() < 0.2:
        params["ignore_eos"] = True
    if choose.random() < 0.2:
        params["logprobs"] = choose.choice((0, 2))
        params["logprob_token_ids"] = choose.choice(((), ids_of("ab")))
    if choose.random() < 0.15:
        params["prompt_logprobs"] = choose.choice((0, 2))
    if choose.random() < 0.1:
        params["allowed_token_ids"] = ids_of("abc")
    if choose.random() < 0.15 and "min_tokens" not in params:
        params["grammar"] = Grammar("regex", choose.choice(("fine", "fine too", REFUSED_GRAMMAR)))
    return params


def _departure(choose: random.Random) -> Departure:
    match choose.randrange(4):
        case 0:
            return Departure(how="chunks", at=choose.randint(0, 6))
        case 1:
            return Departure(how="error", at=choose.randint(0, 6))
        case 2:
            return Departure(how="time", at=choose.choice(_SECONDS) + choose.choice(_SECONDS))
        case _:
            when_woken = choose.random() < 0.5
            return Departure(how="checkpoint", at=choose.randint(1, 12), when_woken=when_woken)


def _faults(choose: random.Random) -> list[Fault]:
    if choose.random() < 0.4:
        return []
    what = ("killed", "killed", "dies", "dies", "fails", "blames", "fatal", "hangs", "pauses")
    faults = []
    for worker in range(choose.choice((1, 1, 2, 4))):
        for _ in range(choose.choice((0, 1, 1, 2))):
            kind = choose.choice((*what, "loading") if worker or choose.random() < 0.2 else what)
            at: float = choose.choice((0, 1, 2, 3, 5, 8, 13))
            if kind in ("killed", "loading"):
                at = choose.uniform(0, 0.3)
            faults.append(Fault(worker=worker, what=kind, at=at, seconds=choose.uniform(0, 1.5)))
    return faults


def _pauses(choose: random.Random, span: float) -> tuple[Pause, ...]:
    return tuple(
        Pause(
            at=choose.uniform(0, span + 0.4),
            mode=choose.choice(
                ("wait", "retract", "in_place", "exchange wait", "exchange retract", "release")
            ),
            seconds=choose.choice(_SECONDS),
            flushes=choose.random() < 0.5,
        )
        for _ in range(choose.choice((0, 0, 0, 1, 1, 2)))
    )


def _with_tenants(choose: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Return the same clients, of several tenants in half of the scenarios."""
    if choose.random() < 0.5:
        return clients
    return [attrs.evolve(client, tenant=choose.choice(("", "a", "a", "b"))) for client in clients]


def _with_retention(choose: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Return the same clients, some with retention of their pages."""
    if choose.random() < 0.7:
        return clients
    return [
        attrs.evolve(client, retention=_retention(choose)) if choose.random() < 0.5 else client
        for client in clients
    ]


def _retention(choose: random.Random) -> Retention:
    start = choose.choice((0, 0, 3))
    middle = start + choose.randint(1, 12)
    return Retention(
        [
            RetentionRange(start, middle, choose.choice((0, 35, 50, 100)), _duration(choose)),
            RetentionRange(middle, None, choose.randint(0, 100), _duration(choose)),
        ],
        choose.choice((None, 0, 35, 80)),
        _duration(choose),
    )


def _duration(choose: random.Random) -> int | None:
    return choose.choice((None, 0, 20, 200, 5000))


def _with_sessions(choose: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Return the same clients, with their requests as turns of sessions where possible."""
    if choose.random() < 0.7:
        return clients
    timeout = choose.choice((None, None, 3 * STEP, 30 * STEP))
    uses = [
        SessionUse(
            number=choose.randrange(2),
            how=choose.choice(("last", "last", "last", "last", "anew", "replace")),
            offset=choose.choice((None, None, None, 3, -1)),
            timeout=timeout,
        )
        for _ in clients
    ]
    return [
        attrs.evolve(client, session=use) if _may_be_a_turn(client) else client
        for client, use in zip(clients, uses, strict=True)
    ]


def _may_be_a_turn(client: SimulatedClient) -> bool:
    is_chat = not isinstance(client.prompt, str) and not isinstance(client.prompt[0], int)
    is_cut = "truncate_prompt_tokens" in client.params
    return client.num_outputs == 1 and not (is_chat or is_cut or client.poisonous)


def _poisonous(client: SimulatedClient) -> SimulatedClient:
    params = {name: value for name, value in client.params.items() if name != "grammar"}
    return attrs.evolve(client, poisonous=True, leaves=None, timeout=None, params=params)


def _with_adapters(
    choose: random.Random, clients: list[SimulatedClient], span: float, options: dict[str, Any]
) -> tuple[tuple[AdapterChange, ...], list[SimulatedClient]]:
    """Return changes of adapters, and the same clients, some with an adapter."""
    if choose.random() < 0.65:
        return (), clients
    options["enable_lora"] = True
    options["max_loras"] = choose.choice((1, 1, 2, 3))
    options["max_cpu_loras"] = options["max_loras"] + choose.choice((0, 0, 1))
    names = ("x", "y", "z", "w")[: choose.randint(1, 4)]
    changes = [change for name in names for change in _comings(choose, name, span)]
    having = [
        attrs.evolve(client, adapter=choose.choice(names))
        if client.session is None and choose.random() < 0.7
        else client
        for client in clients
    ]
    return tuple(changes), having


def _comings(choose: random.Random, name: str, span: float) -> list[AdapterChange]:
    """Return the changes of one adapter name, with another adapter of that name afterwards."""
    at = choose.choice((0.0, 0.0, choose.uniform(0, span)))
    changes = [AdapterChange(at=at, what="load", name=name, path=f"/{name}/first")]
    if choose.random() < 0.15:
        path = f"/{name}/{choose.choice(('bad', 'second'))}"
        at = choose.uniform(0, span)
        changes.append(AdapterChange(at=at, what="load", name=name, path=path))
    if choose.random() < 0.6:
        at = choose.uniform(0, span + 0.4)
        changes.append(AdapterChange(at=at, what="unload", name=name))
        at += choose.choice(_SECONDS)
        if choose.random() < 0.7:
            changes.append(AdapterChange(at=at, what="load", name=name, path=f"/{name}/third"))
    return changes
