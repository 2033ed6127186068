"""The compiled kernels in stages: the bits of one process, in logits and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.models.parallel.link import RankLink
from tests.gpu.cpu.test_compiled_ranks import Outputs, assert_same, fields_of, served
from tests.gpu.cpu.test_native_model import SCORED, prompt_of, run
from tests.gpu.lora.test_models import compiled, load
from tests.support.compiled_ranks import compiled_ranks, compiled_stages
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import EXPERT_FAMILIES, FAMILIES, make_tiny

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)


def in_stages(path: Path, num_stages: int, size: int = 1, **options: Any) -> Outputs:
    with compiled_stages(path, num_stages, size, **options) as (model, link):
        return served(model, link)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_have_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    """In prefill and decode, and whatever the threads of a stage."""
    fields = {**fields_of(family), "num_hidden_layers": 4}
    path = make_tiny(family, tmp_path, **fields)
    alone = served(compiled(path))
    assert_same(in_stages(path, 2), alone)
    assert_same(in_stages(path, 3, threads=2), alone)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_on_both_ends(tied: bool, tmp_path: Path) -> None:
    fields = {**fields_of("llama3"), "num_hidden_layers": 3, "tie_word_embeddings": tied}
    path = make_tiny("llama3", tmp_path, **fields)
    assert_same(in_stages(path, 3), served(compiled(path)))


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("family", ["qwen2", *sorted(EXPERT_FAMILIES)])
def test_stages_of_two_ranks_have_the_bits_of_their_slices(
    family: str, by_expert: bool, tmp_path: Path
) -> None:
    """Also stages of one rank, with as many slices."""
    if by_expert and family not in EXPERT_FAMILIES:
        return
    path = make_tiny(family, tmp_path, **fields_of(family), num_hidden_layers=3)
    with compiled_ranks(path, 1, slices=4, by_expert=by_expert) as model:
        alone = served(model)
    assert_same(in_stages(path, 2, 2, by_expert=by_expert), alone)
    assert_same(in_stages(path, 3, 1, slices=4, by_expert=by_expert), alone)


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_rounded_weights_have_the_same_bits(family: str, quantization: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, **fields_of(family), num_hidden_layers=3)
    alone = served(compiled(path, quantization))
    for num_stages in (2, 3):
        assert_same(in_stages(path, num_stages, quantization=quantization), alone)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q4_1", "Q6_K"])
def test_a_file_s_blocks_have_the_same_bits(stored: str, tmp_path: Path) -> None:
    folder = make_tiny("smollm2", tmp_path, **fields_of("smollm2"), num_hidden_layers=3)
    path = write_gguf(folder, tmp_path / "tiny.gguf", quantization=stored)
    alone = served(compiled(path, "auto"))
    for num_stages in (2, 3):
        assert_same(in_stages(path, num_stages, quantization="auto"), alone)


@pytest.mark.single_kernels
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_every_instruction_set_has_the_same_bits(
    quantization: str, each_way: str, tmp_path: Path
) -> None:
    """With prompts of more rows than a chunk, and contexts of several blocks of keys."""
    path = make_tiny("qwen3", tmp_path, **fields_of("qwen3"), num_hidden_layers=3)
    prompt = [*prompt_of(250), *prompt_of(250, seed=1)]

    def logits(model: CpuModel, link: RankLink | None = None) -> dict[Any, torch.Tensor]:
        maker, sampler, _ = run(model, link)
        maker.open(0, prompt[:490], SCORED)
        for count in (240, 250, 1, 1):
            maker.step({0: count})
        return sampler.seen

    alone = logits(compiled(path, quantization))
    assert len(alone) == 3
    for num_stages in (2, 3):
        with compiled_stages(path, num_stages, quantization=quantization) as (model, link):
            found = logits(model, link)
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[tokens], alone[tokens]) for tokens in alone)


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_each_stage_adds_the_updates_of_its_layers(family: str, tmp_path: Path) -> None:
    """Beside rows without, of two ranks, loaded and unloaded between steps."""
    path = make_tiny(family, tmp_path / "model", **fields_of(family), num_hidden_layers=3)
    paths = [make_adapter(path, tmp_path / f"{rank}", seed=rank, rank=rank) for rank in (4, 20)]

    def logits(model: CpuModel, link: RankLink | None = None) -> list[dict[Any, torch.Tensor]]:
        load(model, *paths)
        assert model.adapters is not None
        maker, sampler, _ = run(model, link)
        for place in range(5):
            maker.open(place, prompt_of(8 + 8 * place, seed=place), SCORED, adapter=place % 3)
        maker.step({place: 8 + 8 * place for place in range(5)})
        maker.step(dict.fromkeys(range(5), 1))
        for place in (1, 4):
            maker.close(place)
        model.adapters.unload(1)
        maker.step({2: 1, 3: 1})
        return sampler.seen

    alone = logits(compiled(path))
    assert len(alone) == 12
    for num_stages in (2, 3):
        with compiled_stages(path, num_stages) as (model, link):
            found = logits(model, link)
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[tokens], alone[tokens]) for tokens in alone)
