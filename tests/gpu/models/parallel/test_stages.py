"""The stages of a model: each layer is in one, they are about equal, and compute what one does."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu.models.decoder import Decoder
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Ranks
from gpu.models.parallel.stages import Stage, split_layers, stages_of
from gpu.models.registry import build_model
from gpu.weights import gguf as gguf_files
from gpu.weights import safetensors
from gpu.weights.tensors import load_weights
from tests.support.plans import begun_attention, load_tiny, prompt_logits
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import FAMILIES, make_tiny
from trioserve.model_files import ModelFiles, open_model
from trioserve.protocol.errors import ModelLoadError

TOKENS = [5, 299, 17, 0, 150, 74, 75, 76, 3, 8, 211, 149, 151, 225, 224, 226, 30, 31, 32, 33]


@given(
    layers=st.lists(st.floats(0.25, 4.0), min_size=1, max_size=9),
    paces=st.lists(st.floats(0.25, 4.0), min_size=1, max_size=5),
    head=st.floats(0.0, 8.0),
)
def test_the_longest_stage_is_as_short_as_any_split_makes_it(
    layers: list[float], paces: list[float], head: float
) -> None:
    paces = paces[: len(layers)]

    def longest(ends: tuple[int, ...]) -> float:
        sizes = [sum(layers[a:b]) for a, b in itertools.pairwise((0, *ends, len(layers)))]
        times = list(map(operator.mul, sizes, paces))
        times[-1] += head
        return max(times)

    found = split_layers(layers, paces, head=head)
    assert list(itertools.chain(*found)) == list(range(len(layers)))
    assert all(found)
    every = itertools.combinations(range(1, len(layers)), len(paces) - 1)
    ends = tuple(stage.stop for stage in found[:-1])
    assert longest(ends) <= min(map(longest, every)) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("count", "num_stages", "head", "sizes"),
    [
        (8, 2, 0, [4, 4]),
        (7, 3, 0, [3, 2, 2]),
        (32, 2, 2.4, [17, 15]),
        (32, 4, 2.4, [9, 9, 8, 6]),
        (4, 3, 50, [2, 1, 1]),
        (3, 3, 0, [1, 1, 1]),
    ],
)
def test_equal_layers_are_split_evenly_but_for_the_head(
    count: int, num_stages: int, head: float, sizes: list[int]
) -> None:
    assert [
        len(part) for part in split_layers([1.0] * count, [1.0] * num_stages, head=head)
    ] == sizes


def test_experts_and_the_head_weigh_what_a_step_reads(tmp_path: Path) -> None:
    files = open_model(make_tiny("qwen3_moe", tmp_path, num_hidden_layers=8, vocab_size=3000))
    # The second layer has no experts, and the head has as many weights as four layers.
    sizes = [stage.stop - stage.first for stage in stages_of(files.native, 2)]
    assert sizes == [6, 2]
    with pytest.raises(ModelLoadError, match="size 9 is more than the model's 8 layers"):
        stages_of(files.native, 9)
    stages = stages_of(files.native, 3, [1, 6, 1])
    assert [(stage.first, stage.stop) for stage in stages] == [(0, 1), (1, 7), (7, 8)]
    with pytest.raises(ModelLoadError, match="layers has 7 layers, and the model 8"):
        stages_of(files.native, 3, [1, 5, 1])


def load_part(files: ModelFiles, part: ModelPart, ranks: Ranks | None = None) -> Decoder:
    """Return the model of a part, of whose layers alone the files are read."""
    wanted = [name for name in expected_names(files) if part.name_of(name) is not None]
    weights = load_weights(files, torch.float32, lambda *_: None, wanted.__contains__)
    return build_model(files.native, weights, None, part, ranks)


def expected_names(files: ModelFiles) -> list[str]:
    return [name for name, _ in load_weights(files, torch.float32, lambda *_: None)]


def states_of(decoder: Decoder, before: torch.Tensor) -> torch.Tensor:
    """Return the states behind the layers of a stage; ``before`` are tokens, or states."""
    with torch.inference_mode():
        attention = begun_attention(decoder, len(before))
        if before.dtype == torch.int64:
            return decoder.forward(before, attention)
        return decoder.go_on(before.clone(), attention)


@pytest.mark.parametrize(("num_stages", "size"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_compute_the_logits_of_one_model(
    tmp_path: Path, family: str, num_stages: int, size: int
) -> None:
    files = open_model(make_tiny(family, tmp_path, num_hidden_layers=max(num_stages, 3)))
    alone = prompt_logits(load_tiny(tmp_path), TOKENS)
    states = [torch.tensor(TOKENS)] * size
    for stage in stages_of(files.native, num_stages):

        def compute(
            rank: int, ranks: Ranks, stage: Stage = stage, before: Any = tuple(states)
        ) -> torch.Tensor:
            part = ModelPart(files.native, rank, size, stage=stage)
            decoder = load_part(files, part, ranks if size > 1 else None)
            after = states_of(decoder, before[rank])
            return decoder.logits(after) if stage.is_last else after

        states = on_ranks(size, compute)
    if size == 1:  # the next stage goes on with the numbers that the next layer would have got
        assert torch.equal(states[0], alone)
    torch.testing.assert_close(states[0], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_each_tensor_is_in_one_stage_but_for_a_tied_head(tmp_path: Path, tied: bool) -> None:
    files = open_model(make_tiny("llama3", tmp_path, num_hidden_layers=5, tie_word_embeddings=tied))
    stages = stages_of(files.native, 3)
    for name in expected_names(files):
        own = [stage.name_of(name) for stage in stages]
        there = [index for index, found in enumerate(own) if found is not None]
        if name == "model.embed_tokens.weight":
            assert there == ([0, 2] if tied else [0])
        elif ".layers." not in name:
            assert there == [2]
        else:
            assert len(there) == 1
            layer = int(name.split(".")[2]) - stages[there[0]].first
            assert own[there[0]] == name.replace(f".{name.split('.')[2]}.", f".{layer}.", 1)


def test_a_stage_has_the_shape_of_its_layers(tmp_path: Path) -> None:
    files = open_model(make_tiny("qwen2_window", tmp_path))
    whole = files.native
    own = Stage(whole, 1, 3).config()
    assert own.windows == whole.windows[1:3]
    assert own.rope_layers == whole.rope_layers[1:3]
    changed = {"num_layers", "windows", "rope_layers"}
    both = attrs.asdict(own), attrs.asdict(whole)
    assert all(both[0][name] == both[1][name] for name in both[1].keys() - changed)
    moe = open_model(make_tiny("qwen3_moe", tmp_path / "moe")).native
    experts = Stage(moe, 1, 3).config().experts
    assert experts is not None
    assert experts.layers == (False, True)


@pytest.mark.parametrize("gguf", [False, True])
def test_only_the_own_layers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: bool
) -> None:
    folder = make_tiny("llama2", tmp_path / "model", num_hidden_layers=4)
    files = open_model(write_gguf(folder, tmp_path / "m.gguf") if gguf else folder)
    part = ModelPart(files.native, 0, 1, stage=stages_of(files.native, 4)[1])
    module = gguf_files if gguf else safetensors
    read: list[int] = []
    original = module.read_bytes

    def note(path: Path, file: Any, offset: int, num_bytes: int) -> Any:
        read.append(num_bytes)
        return original(path, file, offset, num_bytes)

    monkeypatch.setattr(module, "read_bytes", note)
    progress: list[tuple[int, int]] = []
    weights = load_weights(
        files,
        torch.float32,
        lambda done, total: progress.append((done, total)),
        lambda name: part.name_of(name) is not None,
    )
    names = [name for name, _ in weights]
    assert len(read) == len(names)
    assert names
    assert all(name.startswith("model.layers.1.") for name in names)
    assert progress[-1][0] == progress[-1][1]
