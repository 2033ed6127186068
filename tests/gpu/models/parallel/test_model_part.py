"""The parts of a model: every number is on a rank, and what can't be split is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Ranks
from gpu.models.registry import build_model
from gpu.weights.tensors import load_weights
from tests.support.plans import load_tiny, prompt_logits
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_models import EXPERT_FAMILIES, FAMILIES, make_tiny
from trioserve.model_files import ModelConfig, open_model
from trioserve.protocol.errors import ModelLoadError

TOKENS = [5, 299, 17, 0, 150, 74, 75, 76, 3, 8, 211, 149, 151, 225, 224, 226, 30, 31, 32, 33]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ranks_compute_the_logits_of_one(tmp_path: Path, family: str, size: int) -> None:
    """The model has four heads and two of keys and values, so four ranks share those."""
    files = open_model(make_tiny(family, tmp_path))

    alone = prompt_logits(load_tiny(tmp_path), TOKENS)
    for by_expert in (False, True) if family in EXPERT_FAMILIES else (False,):

        def logits(rank: int, ranks: Ranks, by_expert: bool = by_expert) -> torch.Tensor:
            weights = load_weights(files, torch.float32, lambda done, total: None)
            part = ModelPart(files.native, rank, size, by_expert)
            return prompt_logits(build_model(files.native, weights, None, part, ranks), TOKENS)

        found = on_ranks(size, logits)
        torch.testing.assert_close(found[0], alone, rtol=0, atol=1e-4)
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_number_is_on_a_rank(tmp_path: Path, size: int) -> None:
    """Put together, the pieces are the model; three ranks have a vocabulary that isn't even."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": size, "head_dim": 8}
    files = open_model(make_tiny("llama3", tmp_path, vocab_size=301, hidden_size=96, **heads))
    shards = [ModelPart(files.native, rank, size) for rank in range(size)]
    for name, tensor in load_weights(files, torch.float32, lambda done, total: None):
        pieces = [piece for shard in shards if (piece := shard.piece(name, tensor)) is not None]
        assert len(pieces) == size
        if all(piece.shape == tensor.shape for piece in pieces):
            assert torch.equal(pieces[0], tensor)
            # What is added to a sum is added once.
            is_added = name.endswith(("o_proj.bias", "down_proj.bias"))
            assert all(torch.equal(each, tensor * (not is_added)) for each in pieces[1:])
            continue
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        whole = torch.cat(pieces, dim)
        assert torch.equal(whole[: len(tensor)], tensor)
        assert not whole[len(tensor) :].any()


def small(**sizes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            **{"family": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96},
            **{"num_layers": 1, "num_heads": 12, "num_kv_heads": 4, "head_dim": 8},
            **{"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
            **sizes,
        }
    )


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({}, 5, "5 doesn't divide the model's 12 heads"),
        ({}, 6, "6 neither divides the model's 4 heads of keys and values nor is a multiple"),
        ({"intermediate_size": 98}, 4, "4 doesn't divide the intermediate size 98"),
    ],
)
def test_what_cannot_be_split_is_refused(sizes: dict[str, int], size: int, message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--tensor-parallel-size {message}"):
        ModelPart(small(**sizes), 0, size)


def test_a_rank_has_its_part_of_the_cache() -> None:
    assert ModelPart(small(), 0, 2).config().num_kv_heads == 2
    # More ranks than heads of keys and values: each has one, as others do.
    assert ModelPart(small(), 7, 12).config().num_kv_heads == 1
    whole = attrs.asdict(small())
    own = attrs.asdict(ModelPart(small(), 1, 4).config())
    changed = {"vocab_size", "num_heads", "num_kv_heads", "intermediate_size"}
    assert {name for name in whole if whole[name] != own[name]} == changed
