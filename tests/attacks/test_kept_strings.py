"""Long strings where short ones are usual: nothing of them stays."""

from __future__ import annotations

import pytest

from tests.attacks.siege import MAX_BUSY, MAX_GAP, Victim
from tests.attacks.test_bodies import LARGE, TEXT, post


@pytest.mark.parametrize("name", ["cache_salt", "user"])
def test_a_long_string_in_many_requests(victim: Victim, name: str) -> None:
    def attack(number: int) -> None:
        # A character of four bytes: the string takes 124 MiB.
        value = b"%s%d%s" % ("\U0001f600".encode(), number, b"x" * LARGE)
        body = b'{"prompt":"x","max_tokens":1,"%s":"%s"}' % (name.encode(), value)
        status, answer = post(victim, TEXT, body)
        assert status == 400, answer
        assert len(answer) < 10_000

    # A virtual machine may take most of a second to back memory that it hasn't used before.
    attack(0)
    with victim.withstands(busy=2 * MAX_BUSY, gap=2 * MAX_GAP):
        for number in range(1, 5):
            attack(number)
