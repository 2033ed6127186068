"""The plans in flight of a worker with several stages.

Each stage computes another plan, so the plans are the pipeline's micro-batches:

- A sequence that decodes has at most one row in flight. Its next row needs the token of the last
  one, which is known when the last stage has computed it.
- A plan takes an equal share of the sequences that decode, so that each stage has one. Those that
  have waited longest come first.
- While sequences decode, there are as many plans in flight as stages. A further one would be a
  further pass over the weights between two tokens of each sequence. While only prompts are
  computed, there is one more, which is there when the first stage has finished the one before.

Chunks of a prompt need no token, so they follow each other in successive plans.

These are pure functions.
"""

from __future__ import annotations

import numpy as np

from trioserve.scheduler.token_counts import Ints


def most_in_flight(most: int, num_stages: int, *, decodes: bool) -> int:
    """Return the number of plans that may be in flight.

    Args:
        most: Number that the limits allow.
        num_stages: Stages of the worker.
        decodes: True if a plan in flight has rows of sequences that decode.
    """
    return min(most, num_stages) if decodes and num_stages > 1 else most


def share_of(last_plans: Ints, num_decoding: int, num_stages: int) -> Ints:
    """Return which of some sequences decode in the next plan, as indices in rising order.

    Args:
        last_plans: Last plan of each sequence that could.
        num_decoding: Number of all sequences that decode, with those in flight.
        num_stages: Stages of the worker.
    """
    share = -(-num_decoding // num_stages)
    first: Ints = np.argsort(last_plans, kind="stable")[:share]
    return np.sort(first)
