"""Scenarios drawn from a seed. Little memory and short queues make trouble likely."""

from __future__ import annotations

import random
from typing import Any

import attrs

from trioserve.protocol.grammar import Grammar
from trioserve.requests.retention import Retention, RetentionRange
from trioserve.testing.simulation.draw_cluster import with_cluster
from trioserve.testing.simulation.draw_tensors import with_tensors
from trioserve.testing.simulation.draw_workers import with_drafts, with_stages
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
FIRST_BEAMS = 2000
"""From this seed on, some clients of half of the scenarios search with beams."""
FIRST_CLUSTERS = 3000
"""From this seed on, most scenarios have several workers."""
REFUSED_GRAMMAR = "refused"
"""Text of a grammar that every worker refuses."""

_ALPHABETS = ("ab", "abc .", "ab\u00e9", "a\U0001f600 ", "\u00e9\U0001f600\u4e2d", "abcdefgh!")
_EOS = "!"
_STOPS = ("a", "ab", "aba", "abab", "b a", "bb", "\u00e9", "\U0001f600", "c.", "aaaa")
_PROMPTS = ("abcabcabcabcabcabc", "aaaaaaaaaaaaaaaaaa", "once upon a time ab")
_SECONDS = (0.0, STEP / 2, STEP, 3 * STEP, 10 * STEP, 1.0)


def draw_scenario(seed: int) -> Scenario:
    """Return the scenario of ``seed``."""
    rng = random.Random(seed)
    worker = _worker(rng)
    count = rng.choice((1, 2, 3, 5, 8, 12, 20))
    span = rng.choice((0.0, 0.05, 0.3))
    clients = [_client(rng, number, worker, span) for number in range(count)]
    if rng.random() < CROWDED:
        clients = _crowd(rng, clients)
    faults = draw_faults(rng)
    options = _options(rng)
    if rng.random() < POISONED:
        # This client kills every worker that runs it. The engine must find it before it fails.
        poisoned = rng.randrange(count)
        clients[poisoned] = _poisonous(clients[poisoned])
        faults = []
        options["max_worker_restarts"] = 3
    worker = _with_host_pages(random.Random(f"host {seed}"), worker)
    worker = _with_disk(random.Random(f"disk {seed}"), worker, options)
    worker = with_drafts(worker, seed)
    worker = with_stages(worker, options, seed)
    clients = _with_retention(random.Random(f"retention {seed}"), clients)
    clients = _with_tenants(random.Random(f"tenants {seed}"), clients)
    clients = _with_beams(random.Random(f"beams {seed}"), clients, seed)
    clients = with_tensors(clients, seed)
    clients = _with_sessions(random.Random(f"sessions {seed}"), clients)
    adapters, clients = _with_adapters(random.Random(f"adapters {seed}"), clients, span, options)
    scenario = Scenario(
        seed=seed,
        options=options,
        worker=worker,
        clients=tuple(clients),
        faults=tuple(faults),
        pauses=_pauses(random.Random(f"pauses {seed}"), span),
        adapters=adapters,
        eos_token_ids=ids_of(_EOS),
        ends=rng.choice(("idle", "idle", "idle", "drain", "abort", "cancel")),
        ends_at=rng.uniform(0, span + 0.6),
    )
    return scenario if seed < FIRST_CLUSTERS else with_cluster(seed, scenario, span, draw_faults)


def _worker(rng: random.Random) -> WorkerKind:
    page_size = rng.choice((1, 2, 4, 8))
    num_pages = rng.randint(36, 72) // page_size + rng.choice((1, 1, 2, 40))
    shrinks = rng.random() < 0.05
    return WorkerKind(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=rng.choice((48, 64, 256)),
        max_num_batched_tokens=rng.choice((1, 3, 8, 16, 64)),
        alphabet=tuple(dict.fromkeys(ids_of(rng.choice(_ALPHABETS)))),
        no_token_every=rng.choice((0, 0, 0, 0, 40)),
        computes_past_stop=rng.random() < 0.5,
        step_time=rng.choice((0.0, STEP, STEP, STEP)),
        seconds_per_token=rng.choice((0.0, 0.0, STEP / 10)),
        call_time=rng.choice((0.0, STEP, 5 * STEP, 3.0)),
        load_time=rng.choice((0.0, 0.1, 2.0)),
        link_delay=rng.choice((0.0, 0.0, STEP / 3)),
        pages_after_loss=max(1, num_pages // 2) if shrinks else None,
    )


def _with_host_pages(rng: random.Random, worker: WorkerKind) -> WorkerKind:
    """Give half of the workers memory on the host, mostly too little."""
    if rng.random() < 0.5:
        return worker
    return attrs.evolve(worker, num_host_pages=rng.choice((1, 4, worker.num_pages, 1000)))


def _with_disk(rng: random.Random, worker: WorkerKind, options: dict[str, Any]) -> WorkerKind:
    """Give half of the workers with memory on the host a disk, mostly too small."""
    if not (worker.num_host_pages and options["enable_prefix_caching"] and rng.random() < 0.5):
        return worker
    options.update(kv_offloading_bytes=1, kv_offloading_dir="disk")
    return attrs.evolve(worker, disk_pages=rng.choice((1, 8, worker.num_pages, 1000)))


def _with_beams(
    rng: random.Random, clients: list[SimulatedClient], seed: int
) -> list[SimulatedClient]:
    """From :data:`FIRST_BEAMS` on, let some clients of half of the scenarios search with beams."""
    if seed < FIRST_BEAMS or rng.random() < 0.5:
        return clients
    return [_searching(rng, each) if rng.random() < 0.4 else each for each in clients]


def _searching(rng: random.Random, client: SimulatedClient) -> SimulatedClient:
    """Return ``client`` with beams over a few tokens, so that they end by all kinds of stops."""
    width = rng.choice((1, 2, 3, 4))
    params = {
        **client.params,
        "n": min(client.num_outputs, width),
        "beam_width": width,
        "length_penalty": rng.choice((0.0, 1.0, 2.0, -1.0)),
        "early_stopping": rng.choice((False, True, "never")),
        "allowed_token_ids": ids_of(rng.choice(("ab!", "abc", "ab\u00e9!", "a."))),
    }
    return attrs.evolve(client, params=params)


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "seed": 0,
        "max_num_seqs": rng.choice((1, 2, 3, 8)),
        "max_plans_in_flight": rng.choice((1, 1, 2, 2, 3)),
        "max_num_queued_reqs": rng.choice((4, 12, 2048, 2048, 2048)),
        "max_num_queued_tokens": rng.choice((None, None, None, None, 100)),
        "default_timeout": rng.choice((None, None, None, None, None, None, 0.25)),
        "scheduling_policy": rng.choice(("fcfs", "fcfs", "fcfs", "lpm", "priority")),
        "capacity_policy": rng.choice(
            ("max_utilization", "max_utilization", "guaranteed_no_evict")
        ),
        "enable_prefix_caching": rng.random() < 0.5,
        "max_stream_bytes": rng.choice((1024, 1 << 20)),
        "max_total_stream_bytes": rng.choice((2048, 256 << 20)),
        "grammar_timeout": 1.0,
        "max_worker_restarts": rng.choice((0, 3, 3, 3, 8, 8)),
        "watchdog_timeout": 5.0,
    }


def _client(rng: random.Random, number: int, worker: WorkerKind, span: float) -> SimulatedClient:
    return SimulatedClient(
        number=number,
        arrives=rng.choice((0.0, rng.uniform(0, span))),
        prompt=(prompt := _prompt(rng)),
        params=_params(rng, number, long=isinstance(prompt, str) and len(prompt) > 100),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice(("", "", "", "salt")),
        timeout=rng.choice((None, None, None, None, rng.choice(_SECONDS))),
        leaves=_departure(rng) if rng.random() < 0.35 else None,
        pause=rng.choice((0.0, 0.0, 0.0, STEP / 2, 5 * STEP, 1.0)),
    )


def _prompt(rng: random.Random) -> Any:
    beginning = rng.choice(_PROMPTS)[: rng.randint(1, 18)]
    text = beginning + "".join(rng.choices("abc", k=rng.choice((0, 0, 1, 5))))
    match rng.randrange(8):
        case 0:
            # long enough to be encoded in a thread
            return (text * 2500)[: rng.randint(2001, 2500)]
        case 1:
            return ({"role": "user", "content": text},)
        case 2 | 3 | 4:
            return ids_of(text)
        case _:
            return text


def _crowd(rng: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Give all clients a common prefix and let them arrive at nearly the same time."""
    beginning = "".join(rng.choices("ab", k=rng.randint(4, 30)))
    return [
        attrs.evolve(
            client,
            arrives=rng.choice((0.0, 0.0, STEP, 3 * STEP)),
            prompt=(*ids_of(beginning), *ids_of("".join(rng.choices("abc", k=3)))),
            cache_salt="",
        )
        for client in clients
    ]


def _params(rng: random.Random, number: int, *, long: bool) -> dict[str, Any]:
    max_tokens = rng.choice((0, 1, 2, 5, 10, 20, 30, 30))
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": seed_of(rng.choice((0, 0, 1, 2)), number),
        "n": rng.choice((1, 1, 1, 2, 3)),
    }
    if long:
        params["truncate_prompt_tokens"] = rng.randint(1, 18)
        params["truncation_side"] = rng.choice(("left", "right"))
    if rng.random() < 0.4:
        params["stop"] = tuple(rng.sample(_STOPS, rng.randint(1, 3)))
        params["include_stop_str_in_output"] = rng.random() < 0.3
    if rng.random() < 0.3:
        params["stop_token_ids"] = ids_of(rng.choice("abc"))
        params["include_stop_str_in_output"] = rng.random() < 0.3
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(0, max_tokens)
    if rng.random() < 0.2:
        params["ignore_eos"] = True
    if rng.random() < 0.2:
        params["logprobs"] = rng.choice((0, 2))
        params["logprob_token_ids"] = rng.choice(((), ids_of("ab")))
    if rng.random() < 0.15:
        params["prompt_logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.1:
        params["allowed_token_ids"] = ids_of("abc")
    if rng.random() < 0.15 and "min_tokens" not in params:
        params["grammar"] = Grammar("regex", rng.choice(("fine", "fine too", REFUSED_GRAMMAR)))
    return params


def _departure(rng: random.Random) -> Departure:
    match rng.randrange(4):
        case 0:
            return Departure(how="chunks", at=rng.randint(0, 6))
        case 1:
            return Departure(how="error", at=rng.randint(0, 6))
        case 2:
            return Departure(how="time", at=rng.choice(_SECONDS) + rng.choice(_SECONDS))
        case _:
            when_woken = rng.random() < 0.5
            return Departure(how="checkpoint", at=rng.randint(1, 12), when_woken=when_woken)


def draw_faults(rng: random.Random) -> list[Fault]:
    """Return the faults of one worker's processes."""
    if rng.random() < 0.4:
        return []
    kinds = (
        "killed",
        "killed",
        "dies",
        "dies",
        "fails",
        "fails_in_row",
        "fatal",
        "hangs",
        "pauses",
    )
    faults = []
    for worker in range(rng.choice((1, 1, 2, 4))):
        for _ in range(rng.choice((0, 1, 1, 2))):
            kind = rng.choice((*kinds, "loading") if worker or rng.random() < 0.2 else kinds)
            at: float = rng.choice((0, 1, 2, 3, 5, 8, 13))
            if kind in ("killed", "loading"):
                at = rng.uniform(0, 0.3)
            faults.append(Fault(worker=worker, what=kind, at=at, seconds=rng.uniform(0, 1.5)))
    return faults


def _pauses(rng: random.Random, span: float) -> tuple[Pause, ...]:
    return tuple(
        Pause(
            at=rng.uniform(0, span + 0.4),
            mode=rng.choice(
                ("wait", "retract", "in_place", "swap wait", "swap retract", "release")
            ),
            seconds=rng.choice(_SECONDS),
            flushes=rng.random() < 0.5,
        )
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))
    )


def _with_tenants(rng: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Spread the clients over several tenants in half of the scenarios."""
    if rng.random() < 0.5:
        return clients
    return [attrs.evolve(client, tenant=rng.choice(("", "a", "a", "b"))) for client in clients]


def _with_retention(rng: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Give some clients a retention of their pages."""
    if rng.random() < 0.7:
        return clients
    return [
        attrs.evolve(client, retention=_retention(rng)) if rng.random() < 0.5 else client
        for client in clients
    ]


def _retention(rng: random.Random) -> Retention:
    start = rng.choice((0, 0, 3))
    middle = start + rng.randint(1, 12)
    return Retention(
        [
            RetentionRange(start, middle, rng.choice((0, 35, 50, 100)), _duration(rng)),
            RetentionRange(middle, None, rng.randint(0, 100), _duration(rng)),
        ],
        rng.choice((None, 0, 35, 80)),
        _duration(rng),
    )


def _duration(rng: random.Random) -> int | None:
    return rng.choice((None, 0, 20, 200, 5000))


def _with_sessions(rng: random.Random, clients: list[SimulatedClient]) -> list[SimulatedClient]:
    """Make the requests of some clients turns of sessions, where possible."""
    if rng.random() < 0.7:
        return clients
    timeout = rng.choice((None, None, 3 * STEP, 30 * STEP))
    uses = [
        SessionUse(
            number=rng.randrange(2),
            how=rng.choice(("last", "last", "last", "last", "scratch", "replace")),
            offset=rng.choice((None, None, None, 3, -1)),
            timeout=timeout,
        )
        for _ in clients
    ]
    return [
        attrs.evolve(client, session=use) if _can_be_turn(client) else client
        for client, use in zip(clients, uses, strict=True)
    ]


def _can_be_turn(client: SimulatedClient) -> bool:
    is_chat = not isinstance(client.prompt, str) and not isinstance(client.prompt[0], int)
    is_cut = "truncate_prompt_tokens" in client.params
    one_output = client.num_outputs == 1 and not client.beam_width
    return one_output and not (is_chat or is_cut or client.poisonous)


def _poisonous(client: SimulatedClient) -> SimulatedClient:
    params = {name: value for name, value in client.params.items() if name != "grammar"}
    return attrs.evolve(client, poisonous=True, leaves=None, timeout=None, params=params)


def _with_adapters(
    rng: random.Random, clients: list[SimulatedClient], span: float, options: dict[str, Any]
) -> tuple[tuple[AdapterChange, ...], list[SimulatedClient]]:
    """Return loads and unloads of adapters, and the clients, some with an adapter."""
    if rng.random() < 0.65:
        return (), clients
    options["enable_lora"] = True
    options["max_loras"] = rng.choice((1, 1, 2, 3))
    options["max_cpu_loras"] = options["max_loras"] + rng.choice((0, 0, 1))
    names = ("x", "y", "z", "w")[: rng.randint(1, 4)]
    changes = [change for name in names for change in _adapter_changes(rng, name, span)]
    with_adapter = [
        attrs.evolve(client, adapter=rng.choice(names))
        if client.session is None and rng.random() < 0.7
        else client
        for client in clients
    ]
    return tuple(changes), with_adapter


def _adapter_changes(rng: random.Random, name: str, span: float) -> list[AdapterChange]:
    """Return the loads and unloads of one name, maybe with another adapter of it afterwards."""
    at = rng.choice((0.0, 0.0, rng.uniform(0, span)))
    changes = [AdapterChange(at=at, what="load", name=name, path=f"/{name}/first")]
    if rng.random() < 0.15:
        path = f"/{name}/{rng.choice(('bad', 'second'))}"
        at = rng.uniform(0, span)
        changes.append(AdapterChange(at=at, what="load", name=name, path=path))
    if rng.random() < 0.6:
        at = rng.uniform(0, span + 0.4)
        changes.append(AdapterChange(at=at, what="unload", name=name))
        at += rng.choice(_SECONDS)
        if rng.random() < 0.7:
            changes.append(AdapterChange(at=at, what="load", name=name, path=f"/{name}/third"))
    return changes
