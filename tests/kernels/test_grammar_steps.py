"""Grammars and the other masks over kernels: with two plans in flight the same as with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import regex

from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.grammars import GrammarVocabulary
from gpu.kernels import KernelLoader
from tests.kernels.serving import Server
from tests.support.tiny_models import make_tiny, tiny_tokenizer
from trioserve.model_files import open_model
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams

EOS = 2
PATTERNS = ["[a-f]{2,5}(, [g-k]+)?x", "[0-9]{8}"]
PARAMS = [
    *(
        SamplerParams(seed=7 + i, stop_ids=[EOS], grammar=Grammar("regex", pattern))
        for i, pattern in enumerate(PATTERNS)
    ),
    SamplerParams(temperature=0.0, allowed_token_ids=[40, 41, 42], bad_words=[[40, 41], [42]]),
    SamplerParams(seed=3),
]
STEPS = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64)


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[GrammarCache]:
    cache = GrammarCache(GrammarVocabulary.of(open_model(folder)))
    for pattern in PATTERNS:
        cache.prepare(Grammar("regex", pattern))
    yield cache
    cache.close()


def outputs(
    folder: Path, loader: KernelLoader, grammars: GrammarCache, *, graphs: bool, ahead: bool
) -> list[list[int]]:
    """Return what four slots get in ``STEPS`` steps."""
    constraints = Constraints(300, grammars)
    server = Server.of(folder, loader, graphs=graphs, adjuster=constraints)
    maker, runner = server.maker, server.runner
    given: list[list[int]] = [[] for _ in PARAMS]
    for slot, params in enumerate(PARAMS):
        maker.open(slot, [5 + slot, 9, 17], params)

    def take() -> None:
        for slot, tokens in maker.accept(runner.finish()).items():
            given[slot] += tokens

    for step in range(STEPS):
        while runner.num_pending and (not runner.accepts or runner.num_pending == 2 or not ahead):
            take()
        runner.submit(maker.plan(dict.fromkeys(range(len(PARAMS)), 3 if step == 0 else 1)))
    while runner.num_pending:
        take()
    return given


def test_plans_in_flight_follow_grammars(
    folder: Path, loader: KernelLoader, grammars: GrammarCache
) -> None:
    one = outputs(folder, loader, grammars, graphs=False, ahead=False)
    for graphs in (False, True):
        assert outputs(folder, loader, grammars, graphs=graphs, ahead=True) == one
    for tokens, pattern in zip(one, PATTERNS, strict=False):
        text = tiny_tokenizer().decode(tokens)
        if tokens[-1] == EOS:
            assert regex.fullmatch(pattern, text), text
        else:
            assert regex.fullmatch(pattern, text, partial=True), text
    assert one[1][-1] == EOS
    assert set(one[2]) <= {40, 41}
    assert all(pair != (40, 41) for pair in zip(one[2], one[2][1:], strict=False))
    assert [len(one[2]), len(one[3])] == [STEPS, STEPS]
