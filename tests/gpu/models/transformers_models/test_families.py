"""Families without a file of their own against transformers: the same tokens, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpu.cpu.torch_model import TorchSampler
from gpu.loading.loaded_model import Serving
from gpu.loading.loading import load
from gpu.models.transformers_models import loading
from tests.gpu.models.transformers_models.models import FAMILIES, make_other
from tests.support.plans import GREEDY, PlanMaker, RecordingSampler, outputs_over_moved_pages
from tests.support.rounding import apart, terms_of_folder
from tests.support.tiny_models import VOCAB_SIZE, make_tiny
from trioserve import EngineConfig
from trioserve.engine.worker_start import start_message

PAGE_SIZE, NUM_PAGES = 4, 64


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> RecordingSampler:
    """The sampler of the models loaded in a test."""
    recording = RecordingSampler(VOCAB_SIZE, "cpu")
    monkeypatch.setattr(loading, "make_sampler", lambda *_: TorchSampler(recording))
    return recording


def serving(folder: Path, **options: Any) -> Serving:
    config = EngineConfig(
        str(folder),
        **{
            "device": "cpu",
            "dtype": "float32",
            "block_size": PAGE_SIZE,
            "num_gpu_blocks_override": NUM_PAGES,
            "num_threads": 1,
            **options,
        },
    )
    return load(start_message(config, folder), lambda *_: None)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def serve_mixed_batches(maker: PlanMaker) -> dict[int, list[int]]:
    """Prompts in pieces beside decodes, a shared prefix, and one that is preempted and resumed.

    Returns the prompt of each slot; what followed is in ``maker``.
    """
    prompts = {0: random_tokens(31, 2), 1: random_tokens(6, 3)}
    prompts[2] = prompts[0][:12] + random_tokens(5, 4)
    maker.open(0, prompts[0])
    maker.step({0: 13})
    maker.open(1, prompts[1])
    maker.step({1: 6, 0: 1})
    maker.open(2, prompts[2], shared_pages=maker.slots[0].pages[:3])
    maker.step({0: 9, 1: 1, 2: 4})
    maker.step({0: 8, 1: 1, 2: 1})
    for _ in range(3):
        maker.step({2: 1, 0: 1, 1: 1})
    so_far = list(maker.slots[1].tokens)
    maker.close(1)
    maker.step({0: 1, 2: 1})
    maker.open(1, so_far, prompt_length=6)
    maker.step({1: len(so_far), 0: 1, 2: 1})
    maker.step({1: 1, 0: 1, 2: 1})
    return prompts


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_and_logits_are_those_of_transformers(
    family: str, tmp_path: Path, sampler: RecordingSampler
) -> None:
    folder = make_other(*FAMILIES[family], tmp_path)
    served = serving(folder)
    sampler.seen = {}
    maker = PlanMaker(served.runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    served.runner.reset(1)
    prompts = serve_mixed_batches(maker)

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for slot, prompt in prompts.items():
        tokens = maker.slots[slot].tokens
        generated = plain.generate(
            torch.tensor([prompt]),
            max_new_tokens=len(tokens) - len(prompt),
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == generated[0].tolist()
        with torch.inference_mode():
            logits = plain(torch.tensor([tokens])).logits[0]
        lengths = [n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in sampler.seen]
        assert len(lengths) >= 6
        seen = torch.stack([sampler.seen[tuple(tokens[:n])] for n in lengths])
        wanted = logits[[n - 1 for n in lengths]]
        # Latent keys and experts at most double the terms.
        bound = apart(2 * terms_of_folder(folder, len(tokens)), wanted)
        torch.testing.assert_close(seen, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("family", ["qwen2_window", "phi3", "mixtral", "qwen3_moe"])
def test_a_native_family_gives_the_same_either_way(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    native = serving(folder)
    through = serving(folder, model_impl="transformers")
    assert "ForCausalLM of transformers" in through.ready.computing
    assert "transformers" not in native.ready.computing
    given = []
    for each in (native, through):
        each.runner.reset(1)
        maker = PlanMaker(each.runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        serve_mixed_batches(maker)
        given.append({slot: known.tokens for slot, known in maker.slots.items()})
    assert given[0] == given[1]


def test_bfloat16_is_as_near_as_transformers_is(tmp_path: Path, sampler: RecordingSampler) -> None:
    folder, tokens = make_other(*FAMILIES["gemma2"], tmp_path), random_tokens(40, 5)
    runner = serving(folder, dtype="bfloat16").runner
    runner.reset(1)
    maker = PlanMaker(runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    maker.open(0, tokens)
    maker.open(1, tokens[:20])
    maker.step({0: 39, 1: 19})
    maker.step({0: 1, 1: 1})
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.inference_mode():
            found[dtype] = plain(torch.tensor([tokens])).logits[0].float()
    exact, theirs = found[torch.float32], found[torch.bfloat16]
    for length in (20, 40):
        error = (sampler.seen[tuple(tokens[:length])] - exact[length - 1]).norm()
        assert error < 1.5 * (theirs[length - 1] - exact[length - 1]).norm()


def test_pages_may_move_to_the_host_and_back(tmp_path: Path) -> None:
    """Move the pages of all layers, whether these are alike or not."""
    folder = make_other(*FAMILIES["deepseek_v3"], tmp_path)
    runner = serving(folder, kv_offloading_bytes=1 << 20).runner
    runner.reset(1)
    maker = PlanMaker(runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    before, after = outputs_over_moved_pages(maker, random_tokens(21, 6), PAGE_SIZE)
    assert before == after
    assert GREEDY.temperature == 0
