"""What a format costs: figures worked out by hand, and a reading of a real model."""

from __future__ import annotations

import math

import pytest

from bench.accuracy import FORMATS, Reading, compare, read


def test_figures_are_those_worked_out_by_hand() -> None:
    reference = Reading([math.log(0.5), math.log(0.25)], [1, 2])
    found = compare("x", Reading([math.log(0.25), math.log(0.25)], [1, 3]), reference)
    assert found.perplexity == pytest.approx(4.0)
    assert found.mean_difference == pytest.approx(math.log(2) / 2)
    assert found.other_choice == 0.5


async def test_a_window_gives_one_figure_for_every_token_but_its_first() -> None:
    windows = [[1, 504, 338, 253, 3575], [1, 1008, 28, 216, 33]]
    reading = await read(FORMATS["float32"], windows)
    assert len(reading.logprobs) == len(reading.most_probable) == 8
    assert all(logprob < 0 for logprob in reading.logprobs)
    assert compare("same", reading, reading).other_choice == 0.0
