"""Runs kernels of rules.cu under a sanitizer; for :mod:`tests.kernels.test_sanitizers` alone.

Its name keeps pytest from collecting it: half of these kernels end the process.
"""

from __future__ import annotations

import pytest
import torch

from gpu.kernels.emulation import EmulatedLoader
from tests.kernels.memory import poisoned
from tests.kernels.test_emulation import run

__all__ = ["BROKEN", "WHOLE"]

# By sanitizer, kernels of rules.cu with their number: what is reported of each, and those that are
# the same but for the defect.
BROKEN = {
    "address": {
        ("past_a_static_array", 120): "AddressSanitizer: use-after-poison",
        ("past_dynamic_memory", 1): "AddressSanitizer: use-after-poison",
        ("signed_overflow", 1): "runtime error: signed integer overflow",
    },
    "thread": {
        ("last_block", 0): "ThreadSanitizer: data race",
        ("neighbor", 0): "ThreadSanitizer: data race",
    },
}
WHOLE = {
    "address": [("past_a_static_array", 0), ("past_dynamic_memory", 0), ("signed_overflow", 0)],
    "thread": [("last_block", 1), ("neighbor", 1)],
}
RULES = [*BROKEN["address"], *WHOLE["address"], *BROKEN["thread"], *WHOLE["thread"]]


@pytest.mark.parametrize(("name", "num"), RULES, ids=lambda value: f"<{value}>")
def test_rule(request: pytest.FixtureRequest, name: str, num: int) -> None:
    loader = EmulatedLoader(sanitizer=request.config.getoption("--kernels-sanitizer"))
    out = poisoned((128,), torch.int32, loader)
    out.zero_()
    run(loader, name, out, num, num_threads=32, num_blocks=4, shared_bytes=1000)
