"""Every family against transformers, on tiny random models: the same logits, however cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers

from gpu.models.linear import Linear
from gpu.models.registry import build_model
from gpu.weights.tensors import load_weights
from tests.support.plans import PlanMaker, load_tiny, make_runner, prompt_logits
from tests.support.rounding import apart, sum_error, terms_of_folder
from tests.support.tiny_models import FAMILIES, make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``tiny(family)`` is the folder of that family's tiny model."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def reference_logits(
    folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return what transformers computes for every position: [T, V] float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def assert_near(
    actual: torch.Tensor, wanted: torch.Tensor, folder: Path, tokens: int | None = None
) -> None:
    """Assert that only rounding tells ``actual`` from ``wanted``, logits of the model there."""
    bound = apart(terms_of_folder(folder, tokens or len(wanted)), wanted)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=bound)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_of_a_whole_prompt(tiny: Any, family: str) -> None:
    folder, tokens = tiny(family), random_tokens(100, 1)
    logits = prompt_logits(load_tiny(folder), tokens)
    assert logits.dtype == torch.float32
    assert_near(logits, reference_logits(folder, tokens), folder)


def test_logits_of_a_prompt_beyond_the_training_length(tiny: Any) -> None:
    folder, tokens = tiny("phi3"), random_tokens(300, 1)
    files = open_model(folder)
    scaling = files.config.rope_scaling
    assert scaling.original_max_position_embeddings < len(tokens) < scaling.long_positions
    config = attrs.evolve(files.config, max_position_embeddings=scaling.long_positions)
    model = build_model(config, load_weights(files, torch.float32, lambda done, total: None))
    assert_near(prompt_logits(model, tokens), reference_logits(folder, tokens), folder)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_of_chunks_decodes_and_prefixes_together(tiny: Any, family: str) -> None:
    folder = tiny(family)
    runner, sampler = make_runner(load_tiny(folder))
    maker = PlanMaker(runner.step)
    first, second = random_tokens(31, 2), random_tokens(6, 3)
    third = first[:12] + random_tokens(5, 4)
    maker.open(0, first)
    maker.step({0: 13})
    maker.open(1, second)
    maker.step({1: 6, 0: 1})
    maker.open(2, third, shared_pages=maker.slots[0].pages[:3])
    maker.step({0: 9, 1: 1, 2: 4})
    maker.step({0: 8, 1: 1, 2: 1})
    for _ in range(6):
        given = maker.step({2: 1, 0: 1, 1: 1})
        assert all(len(tokens) == 1 for tokens in given.values())
    wanted = {slot: reference_logits(folder, known.tokens) for slot, known in maker.slots.items()}
    compared = 0
    for slot, known in maker.slots.items():
        for length in range(1, len(known.tokens)):
            logits = sampler.seen.get(tuple(known.tokens[:length]))
            if logits is not None:
                compared += 1
                expected = wanted[slot][length - 1]
                assert_near(logits, expected, folder, length)
    assert compared == len(sampler.seen) == 7 + 9 + 7


def test_bfloat16_is_as_near_as_the_reference(tiny: Any) -> None:
    folder, tokens = tiny("smollm2"), random_tokens(40, 5)
    runner, sampler = make_runner(load_tiny(folder, torch.bfloat16))
    maker = PlanMaker(runner.step)
    maker.open(0, tokens)
    maker.open(1, tokens[:20])
    maker.step({0: 39, 1: 19})
    maker.step({0: 1, 1: 1})
    exact = reference_logits(folder, tokens)
    theirs = reference_logits(folder, tokens, torch.bfloat16)
    for length in (20, 40):
        error = (sampler.seen[tuple(tokens[:length])] - exact[length - 1]).norm()
        assert error < 1.5 * (theirs[length - 1] - exact[length - 1]).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_plain_product(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype) if with_bias else None
    linear = Linear(weight, bias)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        wanted = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
        size = x.double().abs() @ weight.double().abs().T
        size += bias.double().abs() if bias is not None else 0
        # A sum in float32, rounded before the bias is added and after.
        bound = sum_error(41, size) + sum_error(2, size, dtype)
        assert ((linear(x).double() - wanted).abs() <= bound).all()


class TestRefusals:
    """Weights that don't fit are refused by name."""

    @pytest.fixture
    def parts(self, tiny: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        import safetensors.torch

        folder = tiny("llama2")
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        return open_model(folder).config, weights

    def test_missing_tensor(self, parts: Any) -> None:
        config, weights = parts
        del weights["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(ModelLoadError, match=r"lack .*layers\.1\.self_attn\.k_proj\.weight"):
            build_model(config, weights.items())

    def test_missing_head(self, parts: Any) -> None:
        config, weights = parts
        del weights["lm_head.weight"]
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
            build_model(config, weights.items())

    def test_wrong_shape(self, parts: Any) -> None:
        config, weights = parts
        weights["model.norm.weight"] = torch.ones(5)
        with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has the shape \[5\]"):
            build_model(config, weights.items())

    def test_tensor_without_a_place(self, parts: Any) -> None:
        config, weights = parts
        weights["model.layers.0.self_attn.sinks"] = torch.ones(4)
        with pytest.raises(ModelLoadError, match=r"no place .*self_attn\.sinks"):
            build_model(config, weights.items())

    def test_unknown_family(self, parts: Any) -> None:
        config, weights = parts
        with pytest.raises(ModelLoadError, match="'gemma9' is not supported"):
            build_model(attrs.evolve(config, family="gemma9"), weights.items())
