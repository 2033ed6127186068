"""Dimensions in which two runs may differ without a difference in any output."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

import attrs

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "quantization": ("none", "int8", "int4", "w8a8", "auto"),
    "company": ("alone", "31 others"),
    "cache": ("cold", "prefix hit", "host pages"),
    "chunks": ("1024", "48", "17"),
    "speculation": ("off", "suffix", "ngram", "draft_model"),
    "disturbance": ("none", "preempted", "worker killed", "paused"),
    "threads": ("1", "2"),
    "parallel": ("none", "tensor", "pipeline"),
    "plans": ("1", "2"),
    "workers": ("1", "2"),
    "front_ends": ("1", "2"),
}
"""Values by dimension; weights of another format have other outputs, all else changes nothing.

``auto`` is the format of a GGUF file.
"""


@attrs.frozen(kw_only=True)
class Configuration:
    """A value of each dimension; by default the plainest."""

    quantization: str = "none"
    company: str = "alone"
    cache: str = "cold"
    chunks: str = "1024"
    speculation: str = "off"
    disturbance: str = "none"
    threads: str = "1"
    parallel: str = "none"
    plans: str = "1"
    workers: str = "1"
    front_ends: str = "1"

    @property
    def is_possible(self) -> bool:
        """False if nothing could be preempted."""
        return self.disturbance != "preempted" or self.company != "alone"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in attrs.asdict(self).items())


def plainest(quantization: str) -> Configuration:
    """Return the configuration that the others with these weights are compared with."""
    return Configuration(quantization=quantization)


def covering(dimensions: Mapping[str, Sequence[str]], seed: int = 0) -> list[Configuration]:
    """Return possible configurations in which every possible pair of values occurs.

    They are chosen one after the other: each has as many new pairs as one of many random ones.
    """
    draw = random.Random(seed)
    missing = {pair for each in _all(dimensions) for pair in pairs_of(each)}
    chosen: list[Configuration] = []
    while missing:
        tries = [_random(draw, dimensions, missing) for _ in range(60)]
        best = max(tries, key=lambda each: len(missing & set(pairs_of(each))))
        missing -= set(pairs_of(best))
        chosen.append(best)
    return chosen


def pairs_of(configuration: Configuration) -> Iterable[tuple[tuple[str, str], ...]]:
    """Return the pairs of a configuration's values, each with its dimension."""
    return itertools.combinations(attrs.asdict(configuration).items(), 2)


def _all(dimensions: Mapping[str, Sequence[str]]) -> Iterable[Configuration]:
    """Return possible configurations with all possible pairs: two values, the rest as it fits."""
    for one, other in itertools.combinations(dimensions, 2):
        for values in itertools.product(dimensions[one], dimensions[other]):
            fields = {"company": "31 others", one: values[0], other: values[1]}
            each = Configuration(**fields)
            if each.is_possible:
                yield each


def _random(
    draw: random.Random,
    dimensions: Mapping[str, Sequence[str]],
    missing: set[tuple[tuple[str, str], ...]],
) -> Configuration:
    """Return a possible configuration with a pair that is missing."""
    while True:
        fields = {name: draw.choice(values) for name, values in dimensions.items()}
        fields |= dict(draw.choice(sorted(missing)))
        each = Configuration(**fields)
        if each.is_possible:
            return each
