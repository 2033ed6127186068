"""Long lists of token ids for each of a request's 128 outputs, against a worker that computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.siege import Victim, besieged
from tests.attacks.test_bodies import TEXT, post

VOCABULARY = 49_152
NUM_OUTPUTS = 128
STEP = 5.0
"""Seconds that a step of 128 sequences may take on a busy machine, and the witness waits for it."""


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with besieged("--max-num-seqs", "144", "--max-model-len", "256") as victim:
        yield victim


def ids(number: int) -> bytes:
    return b"[%s]" % b",".join(b"%d" % (each % (VOCABULARY - 1) + 1) for each in range(number))


@pytest.mark.parametrize(
    "fields",
    [
        b'"allowed_token_ids":%s' % ids(1_000_000),
        b'"stop_token_ids":%s,"min_tokens":3' % ids(49_000),
    ],
    ids=["allowed", "stops"],
)
def test_long_lists_of_ids(victim: Victim, fields: bytes) -> None:
    body = b'{"prompt":"x","max_tokens":4,"n":%d,"seed":1,%s}' % (NUM_OUTPUTS, fields)
    with victim.withstands(gap=STEP):
        status, answer = post(victim, TEXT, body)
    assert status == 200, answer[:300]
