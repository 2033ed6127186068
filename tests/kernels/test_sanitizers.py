"""Kernel tests again, under AddressSanitizer with UndefinedBehaviorSanitizer and ThreadSanitizer.

These see what random orders and guard pages don't: a store inside of memory that belongs to another
array, a shift too far, a read that no barrier orders after the write it sees. Each runs in a
process of its own, for a sanitizer's library has to be there from the start.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.fork_server import ForkServer
from tests.kernels.sanitized_rules import BROKEN, WHOLE

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
RULES = HERE / "sanitized_rules.py"

# Few and small, for each variant is built again, and each access is checked.
TESTS = [
    "test_conformance.py -k 'ldmatrix or shuffles'",
    "test_combine_partials.py -k 'log_sums_far'",
    "test_decode_attention.py -k 'test_ring_is_refilled'",
    "test_lora.py -k 'test_several and dtype0'",
    "test_prefill_attention.py -k 'test_chunks or test_e4m3_cache and 80-'",
    "test_prefix_attention.py -k 'test_e4m3_cache and 80-'",
    "test_rms_norm.py -k 'test_each_token'",
    "test_rope_and_write.py -k 'test_a_skipped'",
    "test_silu_mul.py -k 'test_the_order'",
    "test_token_movement.py -k 'test_gather or test_scatter'",
    "test_sampling.py -k 'test_ties_at or test_counts'",
]


@pytest.fixture(scope="module", params=["address", "thread"])
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    server = ForkServer(request.param)
    yield server
    server.close()


@pytest.mark.parametrize("tests", TESTS, ids=lambda tests: tests.partition(".")[0])
def test_no_report(server: ForkServer, tests: str, tmp_path: Path) -> None:
    file, *options = shlex.split(tests)
    log = tmp_path / "log.txt"
    code = server.run([str(HERE / file), *options], log=log)
    assert code == 0, log.read_text()


def test_what_is_broken_is_reported(server: ForkServer, tmp_path: Path) -> None:
    """So that the tests above can't pass because a sanitizer sees nothing."""
    for (name, num), message in BROKEN[server.sanitizer].items():
        log = tmp_path / f"{name}.txt"
        assert server.run([f"{RULES}::test_rule[<{name}>-<{num}>]"], log=log) != 0
        assert message in log.read_text()


def test_what_is_whole_is_not_reported(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    rules = [f"{RULES}::test_rule[<{name}>-<{num}>]" for name, num in WHOLE[server.sanitizer]]
    assert server.run(rules, log=log) == 0, log.read_text()
