"""The compiled model against torch's: every family, every way of batching, every weight format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import load_compiled
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.formats import Format, obstacle_in
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.cpu.pipelined import PipelinedExecutor
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.loading.loaded_model import unseen
from gpu.models.decoder import Decoder
from gpu.models.parallel.link import RankLink
from gpu.models.registry import build_model
from gpu.models.rope import cos_sin_table
from gpu.runner import Runner
from gpu.slots import SlotTable
from gpu.weights.blocks import BFLOAT16
from gpu.weights.tensors import load_weights
from tests.support.plans import GREEDY, PlanMaker, RecordingSampler, make_attention
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import FAMILIES, make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, floats, from_ints, ints

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

PAGE_SIZE, NUM_PAGES, MAX_TOKENS = 4, 128, 256
SCORED = attrs.evolve(GREEDY, logprobs=0)
"""Greedy, but its logits are made and shown to the sampler."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes of whole blocks in every format."""


def compiled(path: Path, quantization: str = "none", threads: int = 2) -> CompiledModel:
    files = open_model(path)
    model = CompiledModel(load_library(), files.config, quantization, threads)
    load_compiled(model, files, unseen)
    model.finish(
        cos_sin_table(files.config, files.config.max_position_embeddings),
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_tokens=MAX_TOKENS,
    )
    return model


def decoder(path: Path, dtype: torch.dtype) -> Decoder:
    files = open_model(path)
    return build_model(files.config, load_weights(files, dtype, lambda done, total: None))


def with_torch(path: Path, dtype: torch.dtype) -> TorchModel:
    model = decoder(path, dtype)
    attention = make_attention(model, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    return TorchModel(model, attention, has_mrope=bool(model.config.mrope_section))


def logits_of(
    model: CpuModel, prompt: Sequence[int], grids: Sequence[ImageGrid] = ()
) -> torch.Tensor:
    """Return the logits [T, V] after every token of ``prompt``, computed at once.

    ``grids`` are images among the tokens.
    """
    count = len(prompt)
    pages = -(-count // PAGE_SIZE)
    opened = OpenSlot(
        slot=0,
        generation=1,
        tokens=from_ints(prompt),
        prompt_length=count,
        computed=0,
        pages=from_ints(range(pages)),
        sampler=GREEDY,
        grids=list(grids),
    )
    plan = Plan(number=1, opened=[opened], row_slots=from_ints([0]), row_counts=from_ints([count]))
    slots = slot_table()
    hidden, ends = model.forward(slots.apply(plan), slots)
    assert ends.tolist() == [count - 1]
    return torch.from_numpy(model.logits(hidden)).clone()


def slot_table(vocab_size: int = 301) -> SlotTable:
    return SlotTable(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=512, vocab_size=vocab_size
    )


def distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, as a part of the logits' own spread."""
    return float((logits - exact).double().square().mean().sqrt() / exact.double().std())


def run(
    model: CpuModel, link: RankLink | None = None
) -> tuple[PlanMaker, RecordingSampler, Runner]:
    """Return what makes plans for ``model`` and runs them, and the sampler that sees its logits.

    With a ``link`` to other stages, the model is the first one.
    """
    sampler = RecordingSampler(300, "cpu")
    sampler.seen = {}
    slots = slot_table()
    slots.adapters = model.adapters or ()
    executor = CpuExecutor(model, TorchSampler(sampler), slots)
    if link is not None:
        executor = PipelinedExecutor(model, TorchSampler(sampler), slots, link, hidden_size=0)
    runner = Runner(executor, slots, max_num_batched_tokens=MAX_TOKENS)
    maker = PlanMaker(runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    return maker, sampler, runner


def come_and_go(maker: PlanMaker, lengths: Sequence[int], *, seed: int) -> dict[int, int]:
    """Prompts of these lengths begin one after the other, cut anyhow, beside those that decode.

    Returns how many tokens of each are left to be computed.
    """
    dice = random.Random(seed)
    left: dict[int, int] = {}
    for slot, length in enumerate(lengths):
        maker.open(slot, prompt_of(length, seed=slot), SCORED)
        left[slot] = length
        rows = {}
        for each in list(left):
            rows[each] = dice.randint(1, left[each]) if left[each] else 1
            left[each] = max(left[each] - rows[each], 0)
        order = list(rows)
        dice.shuffle(order)
        maker.step({each: rows[each] for each in order})
    return left


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(tiny: Path) -> CompiledModel:
    return compiled(tiny)


class TestFamilies:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits_are_as_near_to_the_exact_ones_as_torch_s(
        self, family: str, tmp_path: Path
    ) -> None:
        """Prompts past windows and trained lengths, against float32 weights of bfloat16 numbers."""
        path = make_tiny(family, tmp_path, head_dim=32, torch_dtype="bfloat16")
        prompt = prompt_of(90)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt), exact)
        assert distance(logits_of(compiled(path), prompt), exact) < 1.3 * rounded + 0.002
        assert rounded < 0.1  # else this would say nothing

    def test_odd_shapes(self, tmp_path: Path) -> None:
        """More layers than windows, a head for each key head, heads of 96 and pages of 4."""
        path = make_tiny(
            "mistral",
            tmp_path,
            head_dim=96,
            hidden_size=96,
            intermediate_size=160,
            num_attention_heads=3,
            num_key_value_heads=3,
            num_hidden_layers=3,
            vocab_size=301,
        )
        prompt = prompt_of(33)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        assert distance(logits_of(compiled(path), prompt), exact) < 0.03

    def test_shapes_that_are_not_computed_are_named(self, tmp_path: Path) -> None:
        config = open_model(make_tiny("llama2", tmp_path)).config
        assert obstacle_in(config) == "heads of 16 numbers"
        config = attrs.evolve(config, head_dim=64)
        assert obstacle_in(config) is None
        assert "33 numbers" in str(obstacle_in(attrs.evolve(config, hidden_size=33)))


@pytest.mark.usefixtures("each_isa")
class TestEachInstructionSet:
    """Ask in short of each instruction set what the other tests ask of the fastest."""

    @pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
    def test_logits_are_near_the_exact_ones(self, quantization: str, tmp_path: Path) -> None:
        path = make_tiny("qwen3", tmp_path, torch_dtype="bfloat16", **SIZES)
        exact = logits_of(with_torch(path, torch.float32), prompt_of(90))
        lost = distance(logits_of(compiled(path, quantization), prompt_of(90)), exact)
        assert lost < {"none": 0.03, "int8": 0.06, "int4": 0.6, "w8a8": 0.1}[quantization]

    def test_neither_the_batch_nor_the_threads_change_anything(self, tiny: Path) -> None:
        maker, sampler, _ = run(compiled(tiny, threads=2))
        come_and_go(maker, [1, 40, 7, 90, 17, 64], seed=1)
        assert len(sampler.seen) > 10
        alone = compiled(tiny, threads=1)
        for tokens, logits in sampler.seen.items():
            assert torch.equal(logits, logits_of(alone, tokens)[-1])


class TestSteps:
    """Through the runner: what a sequence's logits are, whatever else its steps compute."""

    def alone(self, model: CpuModel, prompt: list[int], count: int) -> list[torch.Tensor]:
        """Return the logits of ``count`` tokens after ``prompt``, prefilled at once."""
        maker, sampler, _ = run(model)
        maker.open(0, prompt, SCORED)
        tokens = maker.step({0: len(prompt)})[0]
        while len(tokens) < count:
            tokens += maker.step({0: 1})[0]
        return list(sampler.seen.values())

    def test_chunks_of_a_prompt_change_nothing(self, model: CompiledModel) -> None:
        prompt = prompt_of(70)
        whole = self.alone(model, prompt, 3)
        for cuts in ([1] * 69, [33, 36], [64, 5], [2, 3, 64]):
            maker, sampler, _ = run(model)
            maker.open(0, prompt, SCORED)
            for cut in (*cuts, 70 - sum(cuts)):
                maker.step({0: cut})
            maker.step({0: 1})
            maker.step({0: 1})
            assert same(sampler.seen.values(), whole)

    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_neither_the_batch_nor_the_threads_change_anything(
        self, tiny: Path, model: CompiledModel, threads: int
    ) -> None:
        """Prompts of all lengths come and go in chunks of all sizes, beside decode rows."""
        other = compiled(tiny, threads=threads)
        maker, sampler, _ = run(other)
        lengths = [1, 2, 40, 7, 90, 3, 17, 1, 64, 30]
        left = come_and_go(maker, lengths, seed=threads)
        assert len(sampler.seen) > 20
        for slot, length in enumerate(lengths):
            prompt = prompt_of(length, seed=slot)
            mine = [v for k, v in sampler.seen.items() if list(k[:length]) == prompt]
            assert mine or left[slot]
            if mine:
                assert same(mine, self.alone(model, prompt, len(mine)))

    def test_a_prefix_that_is_there_already(self, model: CompiledModel) -> None:
        prompt = prompt_of(50)
        maker, sampler, _ = run(model)
        maker.open(0, prompt, SCORED)
        maker.step({0: 50})
        other = [*prompt[:48], 9, 8, 7]
        maker.open(1, other, SCORED, shared_pages=maker.slots[0].pages[:12])
        maker.step({1: 3, 0: 1})
        assert same([sampler.seen[tuple(other)]], self.alone(model, other, 1))

    def test_greedy_rows_draw_what_their_logits_say(self, model: CompiledModel) -> None:
        maker, sampler, _ = run(model)
        plain = {slot: prompt_of(3 + slot % 5, seed=slot) for slot in range(40)}
        for slot, prompt in plain.items():
            maker.open(slot, prompt)
        drawn = maker.step({slot: len(prompt) for slot, prompt in list(plain.items())[:20]})
        drawn |= maker.step({slot: len(plain[slot]) for slot in range(39, 19, -1)})
        assert not sampler.seen  # their logits weren't needed
        for slot, prompt in plain.items():
            logits = self.alone(model, prompt, 1)[0]
            assert drawn[slot] == [int(logits.argmax())]

    def test_many_rows_of_logits(self, model: CompiledModel) -> None:
        """More rows than are looked through at once."""
        maker, sampler, _ = run(model)
        for slot in range(100):
            maker.open(slot, [3 + slot], SCORED)
        given = maker.step(dict.fromkeys(range(100), 1))
        for slot in range(100):
            assert given[slot] == [int(sampler.seen[(3 + slot,)].argmax())]

    def test_log_probabilities_of_prompts_and_of_named_tokens(
        self, tiny: Path, model: CompiledModel
    ) -> None:
        prompt = prompt_of(40)
        params = SamplerParams(
            temperature=0.0, logprobs=2, prompt_logprobs=3, logprob_token_ids=[5, 7]
        )
        results = []
        for each in (model, with_torch(tiny, torch.float32)):
            maker, _, runner = run(each)
            maker.open(1, prompt_of(9, seed=5))
            maker.open(0, prompt, params, prompt_logprobs_from=1)
            runner.step(maker.plan({1: 9, 0: 25}))
            results.append(runner.step(maker.plan({1: 1, 0: 15})))
        ours, exact = results
        (piece,), (expected,) = ours.prompts, exact.prompts
        assert len(floats(piece.logprobs)) == 14  # the tokens at positions 26 to 39
        for name in ("logprobs", "ids_logprobs"):
            got, wanted = (floats(getattr(p, name)) for p in (piece, expected))
            assert np.abs(got - wanted).max() < 0.3
        assert np.abs(floats(ours.ids_logprobs) - floats(exact.ids_logprobs)).max() < 0.3
        assert len(ints(ours.top_ids)) == 2

    def test_no_token_where_the_logits_hold_nan(self, tmp_path: Path) -> None:
        path = make_tiny("qwen3", tmp_path)
        model = compiled(path)
        hidden = np.full((3, 64), np.nan, dtype=BFLOAT16)
        hidden[1] = 1.0
        best = model.most_probable(hidden, np.array([0, 1, 2, 1]))
        assert best is not None
        assert best[0] == best[2] == -1
        assert best[1] == best[3] == int(model.logits(hidden[1:2]).argmax())


def same(left: Sequence[torch.Tensor] | object, right: Sequence[torch.Tensor]) -> bool:
    """Return whether they are equal bit for bit."""
    pairs = list(zip(left, right, strict=True))  # type: ignore[call-overload]
    return all(torch.equal(a, b) for a, b in pairs)


class TestQuantized:
    @pytest.mark.parametrize(
        ("stored", "formats"),
        [
            ("Q8_0", {Format.Q8_0}),
            ("Q4_0", {Format.Q4_0}),
            ("Q4_1", {Format.Q4_1}),
            ("Q6_K", {Format.BF16}),
            ("F16", {Format.BF16}),
        ],
    )
    def test_a_file_s_blocks_count_for_what_they_stand_for(
        self, stored: str, formats: set[Format], tmp_path: Path
    ) -> None:
        make_tiny("smollm2", tmp_path, **SIZES)
        path = write_gguf(tmp_path, tmp_path / "tiny.gguf", quantization=stored)
        model = compiled(path, "auto")
        assert set(model.num_weights) == formats
        prompt = prompt_of(40)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt), exact)
        assert distance(logits_of(model, prompt), exact) < 1.3 * rounded + 0.002
        whole = compiled(path, "none")
        assert set(whole.num_weights) == {Format.BF16}

    @pytest.mark.parametrize(
        ("quantization", "formats", "layers"),
        [
            ("int8", {Format.Q8_0}, "Q8_0"),
            ("int4", {Format.Q4_0, Format.Q8_0}, "Q4_0"),
            ("w8a8", {Format.W8A8}, "Q8_0"),
        ],
    )
    @pytest.mark.parametrize("tied", [False, True])
    def test_any_model_s_weights_can_be_rounded(
        self, quantization: str, formats: set[Format], layers: str, tied: bool, tmp_path: Path
    ) -> None:
        """Round as a GGUF file with 8 bits for embedding and head does."""
        folder = make_tiny("qwen2", tmp_path, tie_word_embeddings=tied, **SIZES)
        model = compiled(folder, quantization)
        assert set(model.num_weights) == formats
        path = write_gguf(
            folder, tmp_path / "tiny.gguf", quantization="Q8_0", exceptions={"blk": layers}
        )
        prompt = prompt_of(60)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt), exact)
        margin = 3 * rounded if quantization == "w8a8" else 1.3 * rounded + 0.002
        assert distance(logits_of(model, prompt), exact) < margin

    @pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
    def test_batches_and_chunks_change_nothing_here_either(
        self, quantization: str, tmp_path: Path
    ) -> None:
        path = make_tiny("qwen2", tmp_path, **SIZES)
        one, three = (compiled(path, quantization, threads) for threads in (1, 3))
        prompt = prompt_of(64)
        whole = logits_of(three, prompt)
        assert torch.equal(logits_of(one, prompt[:1])[0], whole[0])
        assert same([logits_of(one, prompt[: n + 1])[n] for n in range(0, 64, 7)], whole[::7])

    def test_one_layer_may_have_several_formats(self, tmp_path: Path) -> None:
        make_tiny("smollm2", tmp_path, **SIZES)
        path = write_gguf(
            tmp_path, tmp_path / "tiny.gguf", quantization="F16", exceptions={"attn_k": "Q4_0"}
        )
        model = compiled(path, "auto")
        assert set(model.num_weights) == {Format.Q4_0, Format.BF16}
        prompt = prompt_of(40)
        exact = logits_of(with_torch(path, torch.float32), prompt)
        rounded = distance(logits_of(with_torch(path, torch.bfloat16), prompt), exact)
        assert distance(logits_of(model, prompt), exact) < 1.3 * rounded + 0.002
