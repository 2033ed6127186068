"""Outputs have the same bits in every configuration of the matrix, on a small random model."""

from __future__ import annotations

import attrs
import pytest

from tests.exactness.dimensions import DIMENSIONS, Configuration, covering, pairs_of, plainest
from tests.exactness.run import run, slices_of
from tests.support.kernels import isas
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny

CHOSEN = covering(DIMENSIONS, seed=94)
"""The fewest configurations that any of the first 600 seeds gives.

Each takes five seconds, so every second one is thorough.
"""

pytestmark = pytest.mark.skipif(not isas(), reason="no compiled kernels")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a random model by quantization: the same one, but for ``auto`` as a file of Q4_1."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"), **sizes)
    assert slices_of(str(folder)) == 4
    file = write_gguf(folder, folder / "tiny.gguf", quantization="Q4_1")
    return {name: str(folder) for name in DIMENSIONS["quantization"]} | {"auto": str(file)}


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, list[str]]:
    """Return the facts of the plainest configurations, by quantization."""
    return {name: run(plainest(name), model) for name, model in models.items()}


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(each, id=str(number), marks=[] if number % 2 else [pytest.mark.thorough])
        for number, each in enumerate(CHOSEN)
    ],
)
def test_no_bit_differs(
    configuration: Configuration, models: dict[str, str], expected: dict[str, list[str]]
) -> None:
    weights = configuration.quantization
    assert run(configuration, models[weights]) == expected[weights]


def test_weights_of_another_format_have_other_outputs(expected: dict[str, list[str]]) -> None:
    """The comparison does show differences."""
    assert len({tuple(facts) for facts in expected.values()}) == len(expected)


def test_every_possible_pair_of_values_occurs() -> None:
    found = {pair for each in CHOSEN for pair in pairs_of(each)}
    names = list(DIMENSIONS)
    possible = sum(
        len(DIMENSIONS[one]) * len(DIMENSIONS[other])
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    )
    assert len(found) == possible - 1  # Nothing is preempted alone.
    assert all(each.is_possible for each in CHOSEN)
    assert attrs.fields_dict(Configuration).keys() == DIMENSIONS.keys()
