"""Vectors of prompts over kernels and a whole small model, beside rows that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from gpu.kernels import KernelLoader
from gpu.slots import PlanError
from tests.kernels.serving import Judge, Server
from tests.support.plans import GREEDY
from tests.support.tiny_models import make_tiny
from trioserve.protocol.wire import StepResult, floats

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(41)]
LEAST_COSINE = 0.9999
"""Between vectors in bfloat16 and in float32."""
LEAST_ROW_COSINE = 0.999
"""Between the hidden states, or logits, of single tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64, **heads)


def run(server: Server, plans: list[dict[int, int]]) -> list[StepResult]:
    """Run plans, two in flight; their results."""
    results = []
    for rows in plans:
        if server.runner.num_pending == 2:
            results.append(server.runner.finish())
            server.maker.accept(results[-1])
        server.runner.submit(server.maker.plan(rows))
    while server.runner.num_pending:
        results.append(server.runner.finish())
        server.maker.accept(results[-1])
    return results


def cosine(found: Any, wanted: torch.Tensor) -> float:
    vector = torch.from_numpy(floats(found.vector).copy())
    assert len(vector) == len(wanted)
    return float(torch.cosine_similarity(vector, wanted.float(), dim=0))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_in_chunks_beside_others(
    folder: Path, loader: KernelLoader, graphs: bool, pooling: str
) -> None:
    server = Server.of(folder, loader, graphs=graphs)
    server.maker.open(0, PROMPT[:9])
    server.maker.open(1, PROMPT, attrs.evolve(GREEDY, pooling=pooling))
    server.maker.open(2, PROMPT[5:17], attrs.evolve(GREEDY, pooling="mean"))
    # The last chunk is a single token, for which a graph would do.
    plans = [{0: 9, 1: 20}, {0: 1, 1: 20, 2: 12}, {0: 1, 1: 1}, {0: 1}]
    results = run(server, plans)
    assert [[each.slot for each in result.pooled] for result in results] == [[], [2], [1], []]
    judge = Judge(folder)
    states = judge.hidden(PROMPT)
    wanted = states.mean(0) if pooling == "mean" else states[-1]
    assert cosine(results[2].pooled[0], wanted) > LEAST_COSINE
    of_other = judge.hidden(PROMPT[5:17]).mean(0)
    assert cosine(results[1].pooled[0], of_other) > LEAST_COSINE


def test_a_mean_of_a_part_is_refused(folder: Path, loader: KernelLoader) -> None:
    server = Server.of(folder, loader)
    server.maker.open(0, PROMPT)
    server.maker.step({0: 41})
    pages = server.maker.slots[0].pages[:1]
    server.maker.open(1, PROMPT, attrs.evolve(GREEDY, pooling="mean"), shared_pages=pages)
    with pytest.raises(PlanError, match="isn't computed whole"):
        server.maker.step({1: 25})


@pytest.mark.parametrize("graphs", [False, True])
def test_hidden_states_and_logits_that_are_returned(
    folder: Path, loader: KernelLoader, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slice of eleven rows of logits: a prompt takes several.
    monkeypatch.setattr("gpu.sampling.prompt_logprobs.SLICE_BYTES", 4 * 300 * 11)
    server = Server.of(folder, loader, graphs=graphs)
    asked = attrs.evolve(GREEDY, generation_logits=True)
    server.maker.open(0, PROMPT[:9], asked)
    server.maker.open(1, PROMPT, asked, states_from=3, context_logits_from=5)
    server.maker.open(2, PROMPT[5:17])
    plans = [{0: 9, 1: 20}, {0: 1, 1: 20, 2: 12}, {0: 1, 1: 1, 2: 1}, *[{0: 1, 1: 1}] * 2]
    results = run(server, plans)
    pieces = [piece for result in results for piece in result.tensors]
    judge = Judge(folder)
    seen: dict[tuple[int, str], list[int]] = {}
    for piece in pieces:
        tokens = server.maker.slots[piece.slot].tokens
        of_states = piece.name == "hidden_states"
        wanted = judge.hidden(tokens) if of_states else judge.logits(tokens)
        rows = torch.from_numpy(floats(piece.rows).copy()).reshape(-1, wanted.shape[1])
        wanted = wanted.float()[piece.start : piece.start + len(rows)]
        assert float(torch.cosine_similarity(rows, wanted).min()) > LEAST_ROW_COSINE
        if piece.name == "generation_logits":
            assert int(rows[0].argmax()) == tokens[piece.start + 1]
        place = seen.setdefault((piece.slot, piece.name), [])
        place += range(piece.start, piece.start + len(rows))
    assert seen == {
        (0, "generation_logits"): list(range(8, 13)),
        (1, "generation_logits"): list(range(40, 43)),
        (1, "hidden_states"): list(range(3, 43)),
        (1, "context_logits"): list(range(5, 41)),
    }
