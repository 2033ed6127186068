"""Every fuzzing target on its seeds, and on damage that is the same every time.

``python -m fuzz`` runs the same targets under atheris for as long as one likes.
"""

from __future__ import annotations

import hypothesis
import pytest

from tests.fuzz.target import mutations
from tests.fuzz.targets import TARGETS

MUTATIONS = 25
WITH_BYTES = [name for name, target in TARGETS.items() if target.strategy is None]
WITH_STRATEGY = [name for name, target in TARGETS.items() if target.strategy is not None]


@pytest.mark.parametrize("name", WITH_BYTES)
def test_damaged_bytes(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    for data in (*seeds, *mutations(seeds, MUTATIONS)):
        target.check(data)


@pytest.mark.parametrize("name", WITH_STRATEGY)
def test_damaged_structures(name: str) -> None:
    TARGETS[name].as_test(
        max_examples=MUTATIONS, derandomize=True, phases=[hypothesis.Phase.generate]
    )()
