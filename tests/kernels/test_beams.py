"""Beam searches over the kernels: their scores are those of the same model in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gpu.kernels import KernelLoader
from tests.kernels.serving import NUM_PAGES, PAGE_SIZE, Judge, Server
from tests.support.scheduling import Bench, make_limits, make_request
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.requests.request import Request
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.testing import FakeWorker

WIDTH = 3
MAX_TOKENS = 20
"""Outputs end behind the first page that their beams share."""
PROMPTS = [
    [(7 * i * i + 3 * i + k) % 300 for i in range(length)] for k, length in ((0, 41), (22, 9))
]
MARGIN = 0.01
"""Most that bfloat16 changes the mean log-probability of an output's tokens by."""
MOST_LOST = 1.0
"""Most that the best output's log-probability may lack: nearly equal beams change places."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64, **heads)


def searched(folder: Path, loader: KernelLoader, **options: Any) -> list[Request]:
    """Return the finished searches of both prompts, run together beside a sampled output."""
    server = Server.of(folder, loader, max_num_seqs=8, max_logprobs=2 * WIDTH, **options)
    dimensions = FakeWorker(
        vocab_size=open_model(folder).config.vocab_size,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    bench = Bench(cast("FakeWorker", server.runner), SchedulerCore(make_limits(dimensions)))
    requests = [
        make_request(prompt, max_tokens=MAX_TOKENS, beam_width=WIDTH, n=WIDTH) for prompt in PROMPTS
    ]
    for request in requests:
        bench.core.submit(request, bench.now)
    bench.submit(PROMPTS[1], max_tokens=MAX_TOKENS, seed=5)
    bench.drain()
    assert any(plan.copies for plan in bench.plans)
    return requests


def logprobs(judge: Judge, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of what follows each of ``tokens``: [T, V]."""
    return torch.log_softmax(judge.logits(tokens), dim=-1)


def total_of(judge: Judge, prompt: list[int], output: list[int]) -> float:
    """Return the sum of an output's log-probabilities."""
    found = logprobs(judge, [*prompt, *output[:-1]])[len(prompt) - 1 :]
    return float(found.gather(1, torch.tensor(output)[:, None]).sum())


def best_total(judge: Judge, prompt: list[int]) -> float:
    """Return the sum of the log-probabilities of the best output of a search in float32."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(MAX_TOKENS):
        every = []
        for total, output in beams:
            best = logprobs(judge, [*prompt, *output])[-1].topk(2 * WIDTH)
            for logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                every.append((total + logprob, [*output, token]))
        beams = sorted(every, reverse=True)[:WIDTH]
    return beams[0][0]


def differences(judge: Judge, request: Request) -> list[float]:
    """Return by how much each output's score differs from float32, for each of its tokens.

    The difference is infinite if an output has no score.
    """
    found = []
    for sequence in request.sequences:
        assert sequence.finish is not None
        score = sequence.finish.beam_logprob
        if score is None:  # the logits held NaN
            found.append(math.inf)
            continue
        total = total_of(judge, request.prompt_ids, sequence.output_ids)
        found.append(abs(score - total) / MAX_TOKENS)
    return found


@pytest.mark.parametrize("graphs", [False, True])
def test_scores_are_those_of_the_reference(
    folder: Path, loader: KernelLoader, graphs: bool
) -> None:
    judge = Judge(folder)
    for request in searched(folder, loader, graphs=graphs):
        outputs = {tuple(each.output_ids) for each in request.sequences}
        assert {len(each) for each in outputs} == {MAX_TOKENS}
        assert len(outputs) == WIDTH
        assert max(differences(judge, request)) < MARGIN
        best = total_of(judge, request.prompt_ids, request.sequences[0].output_ids)
        assert best > best_total(judge, request.prompt_ids) - MOST_LOST


def test_pages_that_are_not_copied_are_noticed(
    folder: Path, loader: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_copies = PrefixCache.take_copies
    monkeypatch.setattr(PrefixCache, "take_copies", lambda self: take_copies(self)[:1])
    judge = Judge(folder)
    found = [each for request in searched(folder, loader) for each in differences(judge, request)]
    assert max(found) > MARGIN
