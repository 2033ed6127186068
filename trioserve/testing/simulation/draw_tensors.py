"""Clients that ask for hidden states and logits, drawn from a seed."""

from __future__ import annotations

import random

import attrs

from trioserve.testing.simulation.scenario import SimulatedClient

FIRST_TENSORS = 3000
"""From this seed on, some clients of half of the scenarios ask for output tensors."""


def with_tensors(clients: list[SimulatedClient], seed: int) -> list[SimulatedClient]:
    """Return ``clients``, of which some that don't search with beams ask for output tensors."""
    rng = random.Random(f"tensors {seed}")
    if seed < FIRST_TENSORS or rng.random() < 0.5:
        return clients
    return [
        _asking(rng, each) if not each.beam_width and rng.random() < 0.4 else each
        for each in clients
    ]


def _asking(rng: random.Random, client: SimulatedClient) -> SimulatedClient:
    params = {
        **client.params,
        "return_hidden_states": rng.choice((False, "last", "all", "all")),
        "return_context_logits": rng.random() < 0.5,
        "return_generation_logits": rng.random() < 0.5,
    }
    return attrs.evolve(client, params=params)
