"""Long strings where short ones are usual: nothing of them stays."""

from __future__ import annotations

import pytest

from tests.attacks.siege import MAX_GAP, Victim
from tests.attacks.test_bodies import LARGE, TEXT, post


@pytest.mark.parametrize("name", ["cache_salt", "user"])
def test_a_long_string_in_many_requests(victim: Victim, name: str) -> None:
    wide = "\U0001f600".encode()
    with victim.withstands(gap=2 * MAX_GAP):
        for number in range(4):
            value = b"%s%d%s" % (wide, number, b"x" * LARGE)
            body = b'{"prompt":"x","max_tokens":1,"%s":"%s"}' % (name.encode(), value)
            status, answer = post(victim, TEXT, body)
            assert status == 400, answer
            assert len(answer) < 10_000
