"""A target of the fuzzer: a function that only a fault makes raise, and inputs to begin with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import hypothesis
from hypothesis.strategies import SearchStrategy

__all__ = ["Target", "mutations"]

MAX_MUTATIONS_OF_ONE_INPUT = 6
INTERESTING = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0" * 8, b"\xff" * 4, b"\xff" * 8, b"\r\n", b"[")


@attrs.frozen
class Target:
    """A decoder to be fuzzed.

    ``check`` takes bytes, or what ``strategy`` draws, and raises if and only if it finds a fault:
    an exception that isn't one of the decoder's own, too much memory, a wrong value. ``seeds`` are
    bytes that it decodes.
    """

    name: str
    check: Callable[[Any], None]
    strategy: SearchStrategy[Any] | None = None
    seeds: Callable[[], Sequence[bytes]] = lambda: ()

    def from_bytes(self) -> Callable[[bytes], None]:
        """Return what takes a fuzzer's bytes, which a strategy reads as its choices."""
        if self.strategy is None:
            return self.check
        run: Callable[[bytes], None] = self.as_test().hypothesis.fuzz_one_input
        return run

    def as_test(self, **settings: Any) -> Any:
        """Return a hypothesis test of a target with a strategy."""
        assert self.strategy is not None

        def test(value: Any) -> None:
            self.check(value)

        options = {
            "deadline": None,
            "database": None,
            "suppress_health_check": list(hypothesis.HealthCheck),
            **settings,
        }
        return hypothesis.settings(**options)(hypothesis.given(self.strategy)(test))


def mutations(seeds: Sequence[bytes], count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` damaged versions of ``seeds``, the same for the same arguments."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, MAX_MUTATIONS_OF_ONE_INPUT)):
            _mutate(data, chance)
        yield bytes(data)


def _mutate(data: bytearray, chance: random.Random) -> None:
    # Headers stand in front, and most of a file is weights: half of all damage is done early.
    reach = len(data) if chance.random() < 0.5 else min(len(data), 4096)
    place = chance.randint(0, reach)
    match chance.randrange(6):
        case 0 if data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        case 1 if data:
            data[place % len(data)] = chance.randrange(256)
        case 2:
            data[place:place] = chance.choice(INTERESTING)
        case 3:
            del data[place : place + chance.choice((1, 2, 8, 64))]
        case 4:
            replacement = chance.choice(INTERESTING)
            data[place : place + len(replacement)] = replacement
        case 5 if chance.random() < 0.2:
            del data[place:]
