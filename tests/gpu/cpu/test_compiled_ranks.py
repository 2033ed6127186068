"""The compiled kernels on several ranks: the bits of one, and near the exact logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled_part import choose_slices, cut_weights
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.weights import read_weights
from gpu.weights.blocks import Blocks, Weight
from tests.gpu.cpu.test_native_model import (
    come_and_go,
    compiled,
    distance,
    logits_of,
    prompt_of,
    run,
    with_torch,
)
from tests.gpu.lora.test_models import Sequences, load
from tests.support.compiled_ranks import compiled_ranks
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import EXPERT_FAMILIES, FAMILIES, make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.sampling import SamplerParams

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "moe_intermediate_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes that four ranks have whole blocks of. They share the heads of keys and values."""


def fields_of(family: str) -> dict[str, Any]:
    names = set(SIZES) - (set() if family == "qwen3_moe" else {"moe_intermediate_size"})
    return {"torch_dtype": "bfloat16"} | {name: SIZES[name] for name in names}


Outputs = tuple[dict[tuple[int, ...], torch.Tensor], list[list[int]]]


def served(model: CpuModel, link: RankLink | None = None) -> Outputs:
    """Return the logits of steps with prompts in chunks and decode rows, and greedy tokens."""
    maker, sampler, _ = run(model, link)
    come_and_go(maker, [1, 40, 7, 90, 17, 64], seed=1)
    seen = dict(sampler.seen)
    assert len(seen) > 10
    plain = {slot: prompt_of(1 + slot % 2, seed=slot) for slot in range(10, 50)}
    for slot, prompt in plain.items():
        maker.open(slot, prompt)
    drawn = [maker.step({slot: len(prompt) for slot, prompt in plain.items()})]
    drawn += [maker.step(dict.fromkeys(plain, 1)) for _ in range(2)]
    if link is None:  # else the last stage sends all logits
        assert len(sampler.seen) == len(seen)  # the greedy rows' weren't needed
    return seen, [each[slot] for each in drawn for slot in plain]


def assert_same(found: Outputs, wanted: Outputs) -> None:
    assert found[0].keys() == wanted[0].keys()
    for tokens, logits in wanted[0].items():
        assert torch.equal(found[0][tokens], logits)
    assert found[1] == wanted[1]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ranks_have_the_bits_of_one(family: str, tmp_path: Path) -> None:
    """In prefill and decode, and whatever the threads of a rank; as near to exact as torch's."""
    path = make_tiny(family, tmp_path, **fields_of(family))
    with compiled_ranks(path, 1, slices=4, threads=2) as model:
        alone = served(model)
        logits = logits_of(model, prompt_of(90))
    for size, threads in ((2, 1), (2, 2), (4, 1)):
        with compiled_ranks(path, size, threads=threads) as model:
            assert_same(served(model), alone)
            assert torch.equal(logits_of(model, prompt_of(90)), logits)
    if family not in EXPERT_FAMILIES:  # rounding may give a token other experts
        assert_near_exact(logits, path)


def assert_near_exact(logits: torch.Tensor, path: Path) -> None:
    """Assert that logits of a prompt are about as near to the exact ones as torch's."""
    exact = logits_of(with_torch(path, torch.float32), prompt_of(90))
    rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt_of(90)), exact)
    assert distance(logits, exact) < 1.3 * rounded + 0.002
    assert rounded < 0.15  # else this would say nothing


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_rounded_weights_have_the_same_bits(family: str, quantization: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, **fields_of(family))
    found = []
    for size in (1, 2, 4):
        with compiled_ranks(path, size, slices=4, quantization=quantization) as model:
            found.append(served(model))
            logits = logits_of(model, prompt_of(90))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    whole = logits_of(compiled(path, quantization), prompt_of(90))
    assert distance(logits, whole) < 0.05


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q4_1", "Q6_K"])
def test_a_file_s_blocks_have_the_same_bits(stored: str, tmp_path: Path) -> None:
    folder = make_tiny("smollm2", tmp_path, **fields_of("smollm2"))
    path = write_gguf(folder, tmp_path / "tiny.gguf", quantization=stored)
    found = []
    for size in (1, 2, 4):
        with compiled_ranks(path, size, slices=4, quantization="auto") as model:
            found.append(served(model))
            logits = logits_of(model, prompt_of(90))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    whole = logits_of(compiled(path, "auto"), prompt_of(90))
    assert distance(logits, whole) < 0.05


@pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
def test_whole_experts_have_the_same_bits(family: str, tmp_path: Path) -> None:
    """The intermediate size of experts isn't split; five experts are in slices of one or two."""
    path = make_tiny(family, tmp_path, **fields_of(family))
    found = []
    for size in (1, 2, 4):
        with compiled_ranks(path, size, slices=4, by_expert=True) as model:
            found.append(served(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.single_kernels
def test_every_instruction_set_does_without_other_ranks_experts(
    each_way: str, tmp_path: Path
) -> None:
    path = make_tiny("qwen3_moe", tmp_path, **fields_of("qwen3_moe"))
    found = []
    for size in (1, 2):
        with compiled_ranks(path, size, slices=4, by_expert=True) as model:
            found.append(logits_of(model, prompt_of(90)))
    assert torch.equal(*found)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
def test_experts_are_near_the_exact_ones(family: str, by_expert: bool, tmp_path: Path) -> None:
    """A token has all experts: where it had some, rounding could give it others."""
    fields = {**fields_of(family), "num_experts_per_tok": 5, "initializer_range": 0.1}
    path = make_tiny(family, tmp_path, **fields)
    with compiled_ranks(path, 2, by_expert=by_expert) as model:
        assert_near_exact(logits_of(model, prompt_of(90)), path)


@pytest.mark.single_kernels
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_every_instruction_set_has_the_same_bits(
    quantization: str, each_way: str, tmp_path: Path
) -> None:
    """With more inputs than a tile takes at once, and contexts of several blocks of keys.

    The vocabulary isn't even.
    """
    fields = {**fields_of("qwen3"), "intermediate_size": 8704, "vocab_size": 301}
    path = make_tiny("qwen3", tmp_path, **fields)
    prompt = [*prompt_of(250), *prompt_of(250, seed=1)]
    found = []
    for size in (1, 2, 4):
        options: dict[str, Any] = {"quantization": quantization, "max_tokens": 512}
        with compiled_ranks(path, size, slices=4, **options) as model:
            found.append((logits_of(model, prompt), logits_of(model, prompt[:3])))
    for each in found[1:]:
        assert torch.equal(each[0], found[0][0])
        assert torch.equal(each[1], found[0][1])


def test_one_slice_has_the_bits_of_the_whole_model(tmp_path: Path) -> None:
    """Others haven't: so the other tests would see a difference."""
    path = make_tiny("llama3", tmp_path, **fields_of("llama3"))
    found = []
    for slices in (1, 2, 4):
        with compiled_ranks(path, 1, slices=slices) as model:
            found.append(logits_of(model, prompt_of(90)))
    assert torch.equal(found[0], logits_of(compiled(path), prompt_of(90)))
    assert not torch.equal(found[1], found[0])
    assert not torch.equal(found[2], found[1])


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_adapters_have_the_same_bits(family: str, tmp_path: Path) -> None:
    """Beside rows without, of two ranks, loaded and unloaded between steps."""
    path = make_tiny(family, tmp_path / "model", **fields_of(family))
    paths = [make_adapter(path, tmp_path / f"{rank}", seed=rank, rank=rank) for rank in (4, 20)]
    prompts = [(prompt_of(8 + 8 * place, seed=place), place % 3) for place in range(5)]
    found = []
    for size in (1, 2, 4):
        with compiled_ranks(path, size, slices=4, num_pages=256, max_tokens=512) as model:
            load(model, *paths)
            sequences = Sequences(model)
            found.append([sequences.prefill(prompts), sequences.decode(range(5), 7)])
            assert model.adapters is not None
            model.adapters.unload(1)
            found[-1].append(sequences.decode([2, 3], 8))
    for each in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(each, found[0], strict=True))
    with compiled_ranks(path, 2, num_pages=256, max_tokens=512) as model:
        assert model.adapters is not None
        plain = Sequences(model).prefill([(tokens, 0) for tokens, _ in prompts])
    assert [np.array_equal(*rows) for rows in zip(plain, found[0][0], strict=True)] == [
        *(True, False, False, True, False)
    ]


def test_all_that_a_row_may_ask_for_is_on_rank_0(tmp_path: Path) -> None:
    path = make_tiny("qwen2", tmp_path, **fields_of("qwen2"))
    params = SamplerParams(
        temperature=0.0,
        logprobs=2,
        prompt_logprobs=3,
        logprob_token_ids=[5, 300],
        generation_logits=True,
    )
    froms = {"prompt_logprobs_from": 1, "states_from": 0, "context_logits_from": 2}
    results = []
    for size in (1, 4):
        with compiled_ranks(path, size, slices=4) as model:
            maker, _, runner = run(model)
            maker.open(1, prompt_of(9, seed=5))
            maker.open(0, prompt_of(80), params, **froms)
            first = runner.step(maker.plan({1: 9, 0: 60}))
            results.append([first, runner.step(maker.plan({1: 1, 0: 20}))])
    for alone, together in zip(*results, strict=True):
        (piece,), (other,) = alone.prompts, together.prompts
        assert piece == other
        assert len(alone.tensors) >= 2
        assert alone.tensors == together.tensors
        assert (alone.tokens, alone.logprobs) == (together.tokens, together.logprobs)
        assert (alone.top_ids, alone.ids_logprobs) == (together.top_ids, together.ids_logprobs)


@pytest.mark.parametrize("stored", [None, "Q4_1"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_number_is_on_a_rank(stored: str | None, size: int, tmp_path: Path) -> None:
    path = make_tiny("llama3", tmp_path, **fields_of("llama3"))
    if stored is not None:
        path = write_gguf(path, tmp_path / "tiny.gguf", quantization=stored)
    files = open_model(path)
    weights = list(read_weights(files, None, lambda done, total: None, ["Q4_1"]))
    parts = [
        dict(cut_weights(ModelPart(files.native, rank, size), weights)) for rank in range(size)
    ]
    for name, weight in weights:
        pieces = [numbers(part[name]) for part in parts]
        whole = numbers(weight)
        if all(piece.shape == whole.shape for piece in pieces):
            assert all(np.array_equal(piece, whole) for piece in pieces)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert np.array_equal(np.concatenate(pieces, dim), whole), name


def numbers(weight: Weight) -> Any:
    return weight.raw if isinstance(weight, Blocks) else weight


@pytest.mark.parametrize(
    ("sizes", "size", "asked", "slices"),
    [
        ({}, 1, 4, 4),
        ({}, 2, 0, 4),
        ({}, 4, 8, 8),
        ({"intermediate_size": 192}, 2, 0, 2),
        ({"num_heads": 6, "num_kv_heads": 6, "intermediate_size": 192}, 3, 0, 3),
        ({"intermediate_size": 96}, 2, 0, None),
    ],
)
def test_slices_have_whole_blocks(
    sizes: dict[str, int], size: int, asked: int, slices: int | None, tmp_path: Path
) -> None:
    assert choose_slices(part_of(tmp_path, size, **sizes), asked) == slices


def part_of(folder: Path, size: int, **sizes: int) -> ModelPart:
    config = open_model(make_tiny("qwen2", folder, **fields_of("qwen2"))).native
    return ModelPart(attrs.evolve(config, **sizes), 0, size)


@pytest.mark.parametrize(("size", "asked"), [(2, 3), (1, 3), (2, 32)])
def test_slices_that_do_not_divide_are_refused(size: int, asked: int, tmp_path: Path) -> None:
    message = f"--tensor-parallel-slices {asked} must be a multiple .* 256, 2048 numbers"
    with pytest.raises(ModelLoadError, match=message):
        choose_slices(part_of(tmp_path, size), asked)
