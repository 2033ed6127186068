"""Mixtures of experts by the compiled kernels: every weight format, every way of batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.formats import Format, obstacle_in
from gpu.cpu.library import load_library
from gpu.cpu.loading import load_on_cpu
from gpu.runner import Runner
from gpu.sampling.adjustments import NoAdjuster
from tests.gpu.cpu.test_native_model import (
    SCORED,
    come_and_go,
    compiled,
    distance,
    logits_of,
    prompt_of,
    run,
    same,
    with_torch,
)
from tests.gpu.lora.test_models import all_logits, exact_logits, load, room
from tests.gpu.lora.test_models import compiled as compiled_with_adapters
from tests.gpu.lora.test_models import distance as distance_of
from tests.gpu.lora.test_models import with_torch as with_adapters
from tests.support.lora_adapters import ALL_PARTS, make_adapter
from tests.support.plans import PlanMaker
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import EXPERT_FAMILIES, make_tiny
from trioserve import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.model_files import open_model

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "head_dim": 64,
    "initializer_range": 0.1,
    "torch_dtype": "bfloat16",
}
"""Sizes of whole blocks in every format; the router's numbers are those of bfloat16."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("moe"), torch_dtype="bfloat16")


@pytest.fixture(scope="module")
def model(tiny: Path) -> CompiledModel:
    return compiled(tiny)


@pytest.mark.parametrize(
    ("quantization", "formats", "stored"),
    [
        ("none", {Format.BF16}, "BF16"),
        ("int8", {Format.Q8_0, Format.BF16}, "Q8_0"),
        ("int4", {Format.Q4_0, Format.Q8_0, Format.BF16}, "Q4_0"),
        ("w8a8", {Format.W8A8, Format.BF16}, "Q8_0"),
    ],
)
@pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
def test_every_format_of_weights(
    family: str, quantization: str, formats: set[Format], stored: str, tmp_path: Path
) -> None:
    """Come as near to a file's exact logits as torch with its weights; routers aren't rounded.

    A token has all experts: where it had some, rounding could give it others.
    """
    folder = make_tiny(family, tmp_path, num_experts_per_tok=5, norm_topk_prob=True, **SIZES)
    path = write_gguf(
        folder,
        tmp_path / "tiny.gguf",
        quantization="BF16" if quantization == "none" else "Q8_0",
        exceptions={"ffn_gate_inp": "F32", "blk": stored},
    )
    prompt = prompt_of(60)
    exact = logits_of(with_torch(path, torch.float32), prompt)
    rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt), exact)
    margin = 3 * rounded if quantization == "w8a8" else 1.5 * rounded + 0.01
    rounding, keeping = compiled(folder, quantization), compiled(path, "auto")
    assert set(rounding.num_weights) == formats
    assert distance(logits_of(rounding, prompt), exact) < margin
    if quantization != "w8a8":
        assert distance(logits_of(keeping, prompt), exact) < margin
    assert rounded < 0.15  # else this would say nothing


@pytest.mark.usefixtures("each_isa")
def test_every_instruction_set(tiny: Path) -> None:
    exact = logits_of(with_torch(tiny, torch.float32), prompt_of(60))
    assert distance(logits_of(compiled(tiny), prompt_of(60)), exact) < 0.03


class TestSteps:
    @pytest.mark.parametrize("threads", [1, 3])
    def test_neither_the_batch_nor_the_threads_change_anything(
        self, tiny: Path, model: CompiledModel, threads: int
    ) -> None:
        """Whatever other tokens an expert has: chunks of all sizes beside decode rows."""
        maker, sampler, _ = run(compiled(tiny, threads=threads))
        come_and_go(maker, [1, 40, 7, 90, 3, 17], seed=threads)
        assert len(sampler.seen) > 8
        for tokens, logits in sampler.seen.items():
            assert same([logits], [logits_of(model, tokens)[-1]])

    @pytest.mark.parametrize("quantization", ["int4", "w8a8"])
    def test_nor_do_they_where_weights_are_rounded(self, quantization: str, tmp_path: Path) -> None:
        path = make_tiny("mixtral", tmp_path, **SIZES)
        one, three = (compiled(path, quantization, threads) for threads in (1, 3))
        prompt = prompt_of(64)
        whole = logits_of(three, prompt)
        assert same([logits_of(one, prompt[: n + 1])[n] for n in range(0, 64, 9)], whole[::9])

    def test_many_inputs(self, tmp_path: Path) -> None:
        """More than a product takes at once, with experts of very different numbers of tokens."""
        path = make_tiny("mixtral", tmp_path, **{**SIZES, "intermediate_size": 4352})
        one, three = compiled(path, threads=1), compiled(path, threads=3)
        prompt = prompt_of(100)
        assert same(logits_of(one, prompt), logits_of(three, prompt))


class TestRouter:
    def change_routers(self, folder: Path, change: Any) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        for name, each in weights.items():
            if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
                change(each)
        save_file(weights, path)

    @pytest.mark.parametrize("normalized", [False, True])
    def test_the_first_of_equal_experts(self, normalized: bool, tmp_path: Path) -> None:
        """Make all experts equally probable: both kernels and torch take the first three."""
        path = make_tiny("qwen3_moe", tmp_path, torch_dtype="bfloat16", norm_topk_prob=normalized)
        self.change_routers(path, lambda router: router.fill(0.0))
        prompt = prompt_of(40)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        assert distance(logits_of(compiled(path), prompt), exact) < 0.05
        # Others' experts may be anything then.
        weights = load_file(path / "model.safetensors")
        for name, each in weights.items():
            if any(f".experts.{number}." in name for number in (3, 4)):
                each[:] = 1e3
        save_file(weights, path / "model.safetensors")
        assert same(logits_of(compiled(path), prompt), logits_of(compiled(path), prompt))
        assert distance(logits_of(compiled(path), prompt), exact) < 0.05

    @pytest.mark.parametrize("count", [1, 3, 16, 33])
    def test_all_experts_of_any_number(self, count: int, tmp_path: Path) -> None:
        """Choose all experts, so that rounding can't change the choice."""
        path = make_tiny(
            "mixtral",
            tmp_path,
            torch_dtype="bfloat16",
            head_dim=32,
            num_local_experts=count,
            num_experts_per_tok=count,
        )
        prompt = prompt_of(50)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt), exact)
        assert distance(logits_of(compiled(path), prompt), exact) < 1.3 * rounded + 0.002

    def test_one_token_s_nan_is_its_own(self, tiny: Path, tmp_path: Path) -> None:
        folder = make_tiny("qwen3_moe", tmp_path, torch_dtype="bfloat16")
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][5] = np.nan
        save_file(weights, folder / "model.safetensors")
        maker, sampler, _ = run(compiled(folder))
        prompts = [[5], prompt_of(9), prompt_of(4, seed=1)]
        prompts = [prompts[0], *([t for t in each if t != 5] for each in prompts[1:])]
        for slot, prompt in enumerate(prompts):
            maker.open(slot, prompt, SCORED)
        maker.step({slot: len(prompt) for slot, prompt in enumerate(prompts)})
        nan, *others = (sampler.seen[tuple(prompt)] for prompt in prompts)
        assert nan.isnan().all()
        whole = compiled(tiny)
        assert same(others, [logits_of(whole, prompt)[-1] for prompt in prompts[1:]])


def test_sizes_of_experts_that_are_not_computed_are_named(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path, moe_intermediate_size=40)
    assert "40 numbers" in str(obstacle_in(open_model(folder).config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_take_the_place_of_those_that_serve(dtype: str, tmp_path: Path) -> None:
    old = make_tiny("mixtral", tmp_path / "old", head_dim=32)
    new = make_tiny("mixtral", tmp_path / "new", head_dim=32, seed=1)

    def served(path: Path) -> Any:
        start = start_message(EngineConfig(str(path), dtype=dtype), path)
        start = attrs.evolve(start, max_model_len=512, max_num_batched_tokens=64)
        files = open_model(path)
        return load_on_cpu(start, files, dtype, 2, lambda *_: None, NoAdjuster())

    def generate(loaded: Any) -> list[int]:
        runner = Runner(loaded.executor, loaded.slots, max_num_batched_tokens=64)
        maker = PlanMaker(runner.step, page_size=16, num_pages=8)
        maker.open(0, prompt_of(20))
        tokens = maker.step({0: 20})[0]
        for _ in range(7):
            tokens += maker.step({0: 1})[0]
        loaded.slots.clear()
        return tokens

    loaded = served(old)
    before, wanted = generate(loaded), generate(served(new))
    swap = loaded.read_weights(open_model(new))
    assert generate(loaded) == before
    swap()
    assert generate(loaded) == wanted != before


@pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
def test_adapters_of_attention(family: str, tmp_path: Path) -> None:
    """By torch exactly as PEFT has it, by the compiled kernels but for rounding."""
    fields = {"head_dim": 32, "num_experts_per_tok": 5, "torch_dtype": "bfloat16"}
    path = make_tiny(family, tmp_path / "model", **fields)
    adapter = make_adapter(path, tmp_path / "adapter", seed=1)
    prompt = prompt_of(24)
    exact = exact_logits(path, adapter, prompt)
    in_float32, native = with_adapters(path), compiled_with_adapters(path)
    for served in (in_float32, native):
        load(served, adapter)
    assert np.abs(all_logits(in_float32, prompt, 1) - exact).max() < room(path, prompt, exact)
    assert distance_of(all_logits(native, prompt, 1), exact) < 0.15
    assert distance_of(all_logits(native, prompt, 0), exact) > 0.3


def test_adapters_of_an_mlp_beside_experts(tmp_path: Path) -> None:
    """Update the MLP of the one layer of three without experts, which PEFT itself leaves out."""
    path = make_tiny("qwen3_moe", tmp_path / "model", num_experts_per_tok=5, torch_dtype="bfloat16")
    adapter = make_adapter(path, tmp_path / "adapter", seed=1, parts=ALL_PARTS, alpha=8, rank=4)
    weights = load_file(path / "model.safetensors")
    updates = load_file(adapter / "adapter_model.safetensors")
    assert any("layers.1.mlp.up_proj" in name for name in updates)
    for name in [name for name in updates if ".lora_A." in name]:
        merged = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[merged] = (
            weights[merged] + 2.0 * updates[name.replace("_A.", "_B.")] @ updates[name]
        )
    prompt = prompt_of(24)
    in_float32, native = with_adapters(path), compiled_with_adapters(path)
    for served in (in_float32, native):
        load(served, adapter)
    ours, theirs = (all_logits(each, prompt, 1) for each in (native, in_float32))
    plain = all_logits(in_float32, prompt, 0)
    save_file(weights, path / "model.safetensors")
    exact = all_logits(with_adapters(path), prompt, 0)
    assert np.abs(theirs - exact).max() < room(path, prompt, exact)
    assert distance_of(ours, exact) < 0.15
    assert distance_of(plain, exact) > 0.3
