"""Mixtures of experts: what a folder says of them, their tensors, the router and the layer itself.

Whole models are compared with transformers in tests/gpu/models/test_models.py; here are the
variants.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gpu.models.linear import Linear
from gpu.models.mlp import Experts, Mlp, choose_experts
from gpu.models.operations.torch_ops import TorchOperations
from gpu.models.parallel.ranks import Alone
from gpu.weights import read_weights
from gpu.weights.blocks import Blocks, Numbers
from gpu.weights.expected import expected_tensors
from tests.gpu.models.test_models import assert_near, random_tokens, reference_logits
from tests.model_files.test_model_files import rewrite
from tests.support.plans import load_tiny, prompt_logits
from tests.support.rounding import apart
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import EXPERT_FAMILIES, make_tiny
from trioserve.model_files import ExpertsConfig, open_model
from trioserve.protocol.errors import ModelLoadError


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"sliding_window": 8, "head_dim": 32}),
        ("mixtral", {"num_experts_per_tok": 5}),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ],
)
def test_logits_are_those_of_transformers(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder, tokens = make_tiny(family, tmp_path, **fields), random_tokens(40, 1)
    logits = prompt_logits(load_tiny(folder), tokens)
    assert_near(logits, reference_logits(folder, tokens), folder)


class TestConfiguration:
    def test_which_layers_have_experts(self, tmp_path: Path) -> None:
        path = make_tiny("qwen3_moe", tmp_path, num_hidden_layers=4) / "config.json"

        def layers(**changes: Any) -> tuple[bool, ...]:
            rewrite(path, **changes)
            experts = open_model(tmp_path).config.experts
            return () if experts is None else experts.layers

        assert layers(mlp_only_layers=None) == (True, True, True, True)
        assert layers(mlp_only_layers=[0, 3]) == (False, True, True, False)
        assert layers(decoder_sparse_step=2) == (False, True, False, False)
        assert layers(mlp_only_layers=[], decoder_sparse_step=3) == (False, False, True, False)
        assert layers(decoder_sparse_step=5) == ()
        assert layers(decoder_sparse_step=1, num_local_experts=0) == ()

    def test_what_may_be_left_out(self, tmp_path: Path) -> None:
        """With transformers' own defaults, and with either name for the number of experts."""
        path = make_tiny("qwen3_moe", tmp_path) / "config.json"
        names = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
        rewrite(path, names, norm_topk_prob=True)
        expected = ExpertsConfig(
            count=128,
            per_token=8,
            intermediate_size=768,
            normalized=True,
            layers=(True, False, True),
        )
        assert open_model(tmp_path).config.experts == expected
        rewrite(path, num_experts=16)
        assert open_model(tmp_path).config.experts == attrs.evolve(expected, count=16)
        path = make_tiny("mixtral", tmp_path) / "config.json"
        rewrite(path, ("num_local_experts", "num_experts_per_tok", "rms_norm_eps"))
        config = open_model(tmp_path).config
        assert config.rms_norm_eps == 1e-5
        assert config.experts == ExpertsConfig(
            count=8, per_token=2, intermediate_size=96, normalized=True, layers=(True, True)
        )

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"num_experts_per_tok": 8}, "a token can't have 8 of 5 experts"),
            ({"num_experts_per_tok": 0}, "has num_experts_per_tok = 0"),
            ({"num_local_experts": 1 << 20}, "can't have 1048576 experts each"),
            ({"moe_intermediate_size": -1}, "has moe_intermediate_size = -1"),
            ({"mlp_only_layers": ["1"]}, "has mlp_only_layers = ['1']"),
            ({"decoder_sparse_step": 0}, "has decoder_sparse_step = 0"),
            ({"norm_topk_prob": "yes"}, "has norm_topk_prob = 'yes'"),
        ],
    )
    def test_what_can_t_be_right(
        self, changes: dict[str, Any], reason: str, tmp_path: Path
    ) -> None:
        rewrite(make_tiny("qwen3_moe", tmp_path) / "config.json", **changes)
        with pytest.raises(ModelLoadError) as caught:
            open_model(tmp_path)
        assert reason in str(caught.value)

    @pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
    def test_the_tensors_are_all_that_transformers_has(self, family: str, tmp_path: Path) -> None:
        """Compare names and shapes: the memory that a GPU needs is counted from them."""
        folder = make_tiny(family, tmp_path)
        stored = load_file(folder / "model.safetensors").values()
        expected = expected_tensors(open_model(folder).config).values()
        assert sum(math.prod(shape) for shape in expected) == sum(each.size for each in stored)


def weights_of(path: Path) -> dict[str, Numbers]:
    """Return all weights of a model in float32."""
    found = {}
    for name, weight in read_weights(open_model(path), np.dtype(np.float32), lambda *_: None):
        assert not isinstance(weight, Blocks)
        found[name] = weight
    return found


def stack(folder: Path, *, experts: int) -> None:
    """Put a layer's experts into the tensors that transformers 5 computes with."""
    weights = weights_of(folder)
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for stem in layers:
        own = [f"{stem}.experts.{number % 5}" for number in range(experts)]
        gate_up = [
            np.concatenate([weights[f"{each}.{part}_proj.weight"] for part in ("gate", "up")])
            for each in own
        ]
        weights[f"{stem}.experts.gate_up_proj"] = np.stack(gate_up)
        down = [weights[f"{each}.down_proj.weight"] for each in own]
        weights[f"{stem}.experts.down_proj"] = np.stack(down)
    kept = {
        name: each
        for name, each in weights.items()
        if "_proj.weight" not in name or "experts" not in name
    }
    save_file(kept, folder / "model.safetensors")


class TestTensors:
    @pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
    def test_every_layout_holds_the_same(self, family: str, tmp_path: Path) -> None:
        folder = make_tiny(family, tmp_path)
        apart = weights_of(folder)
        assert set(apart) == set(expected_tensors(open_model(folder).config))
        in_gguf = weights_of(write_gguf(folder, tmp_path / "tiny.gguf"))
        stack(folder, experts=5)
        stacked = weights_of(folder)
        for other in (in_gguf, stacked):
            assert set(other) == set(apart)
            for name, weight in apart.items():
                assert np.array_equal(weight, other[name]), name

    def test_the_first_gguf_files_have_each_expert_apart(self, tmp_path: Path) -> None:
        folder = make_tiny("mixtral", tmp_path)
        apart = weights_of(folder)
        path = write_gguf(folder, tmp_path / "tiny.gguf", stacked=False)
        old = weights_of(path)
        assert all(np.array_equal(apart[name], weight) for name, weight in old.items())
        assert len(old) == len(apart)

    def test_more_or_fewer_experts_than_the_configuration_has(self, tmp_path: Path) -> None:
        folder = make_tiny("mixtral", tmp_path)
        for experts in (4, 6):
            stack(folder, experts=experts)
            with pytest.raises(ModelLoadError, match=r"has no tensor .*\.experts\."):
                weights_of(folder)
            make_tiny("mixtral", tmp_path)

    def test_an_expert_that_is_there_twice(self, tmp_path: Path) -> None:
        folder = make_tiny("mixtral", tmp_path)
        path = folder / "model.safetensors"
        apart = load_file(path)
        stack(folder, experts=5)
        save_file({**load_file(path), **apart}, path)
        with pytest.raises(ModelLoadError, match=r"holds .*\.experts\..* twice"):
            weights_of(folder)


def experts_config(**changes: Any) -> ExpertsConfig:
    fields = {"count": 6, "per_token": 2, "intermediate_size": 24, "normalized": True, **changes}
    return ExpertsConfig(layers=(True,), **fields)


class TestRouter:
    def test_the_first_of_equals_are_chosen(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, 2.0], [0.0] * 6])
        weights, chosen = choose_experts(logits, experts_config())
        assert chosen.tolist() == [[1, 3], [0, 1]]
        assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]

    def test_weights_that_are_not_normalized(self) -> None:
        logits = torch.tensor([[0.0, math.log(2), math.log(3), -math.inf, -math.inf, -math.inf]])
        weights, chosen = choose_experts(logits, experts_config(normalized=False))
        assert chosen.tolist() == [[2, 1]]
        torch.testing.assert_close(weights, torch.tensor([[3 / 6, 2 / 6]]))

    def test_all_experts(self) -> None:
        logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
        for normalized in (False, True):
            config = experts_config(per_token=6, normalized=normalized)
            weights, chosen = choose_experts(logits.bfloat16(), config)
            assert weights.dtype == torch.float32
            assert chosen.sort().values.tolist() == [list(range(6))] * 5
            torch.testing.assert_close(weights.sum(dim=-1), torch.ones(5))

    def test_what_is_no_number_still_has_experts(self) -> None:
        logits = torch.full((3, 6), math.nan)
        logits[1] = 0.0
        weights, chosen = choose_experts(logits, experts_config())
        assert all(len(set(row)) == 2 for row in chosen.tolist())
        assert weights[1].tolist() == [0.5, 0.5]
        assert weights[0].isnan().all()


@pytest.mark.parametrize("per_token", [1, 2, 6])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_a_layer_is_the_weighted_sum_of_all_its_experts(
    per_token: int, normalized: bool, num_tokens: int
) -> None:
    """Against every expert over every token in float64, most of them with no weight."""
    config = experts_config(per_token=per_token, normalized=normalized)
    generator = torch.Generator().manual_seed(per_token)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    router, x = random(6, 16), random(num_tokens, 16)
    gate_ups, downs = random(6, 48, 16), random(6, 16, 24)
    layer = Experts(
        config=config,
        router=Linear(router),
        experts=[
            Mlp(gate_up=Linear(a), down=Linear(b)) for a, b in zip(gate_ups, downs, strict=True)
        ],
    )
    probabilities = (x.double() @ router.double().T).softmax(dim=-1)
    kept = probabilities >= probabilities.sort(descending=True).values[:, per_token - 1, None]
    weights = probabilities * kept
    if normalized:
        weights /= weights.sum(dim=-1, keepdim=True)
    gate, up = torch.einsum("te,xfe->xtf", x.double(), gate_ups.double()).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    wanted = torch.einsum("xtf,xef,tx->te", inner, downs.double(), weights)
    result = layer.forward(x, TorchOperations(), Alone())
    # The router, gate and up, down, and the sum over a token's experts.
    bound = apart(16 + 16 + 24 + per_token, wanted)
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=bound)
