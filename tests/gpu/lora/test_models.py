"""Models with adapters against PEFT's own and against merged weights, on both paths of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import load_compiled
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.cpu.torch_model import TorchModel
from gpu.loading.loaded_model import unseen
from gpu.lora.torch_adapters import TorchAdapters
from gpu.models.registry import build_model
from gpu.models.rope import cos_sin_table
from gpu.slots import PlanError, SlotTable
from gpu.weights.tensors import load_weights
from tests.support.lora_adapters import make_adapter, merge
from tests.support.plans import GREEDY, make_attention
from tests.support.rounding import apart, terms_of_folder
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import EXPERT_FAMILIES, FAMILIES, make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

try:
    load_library()
    HAS_KERNELS = True
except LibraryBuildError:
    HAS_KERNELS = False

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="no compiled kernels")
PAGE_SIZE, NUM_PAGES, MAX_TOKENS = 4, 256, 512
Logits = npt.NDArray[np.float32]


def with_torch(path: Path, dtype: torch.dtype = torch.float32) -> TorchModel:
    files = open_model(path)
    weights = load_weights(files, dtype, lambda done, total: None)
    model = build_model(files.config, weights)
    attention = make_attention(model, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    return TorchModel(model, attention, TorchAdapters(files.config, 64, model.dtype))


def compiled(path: Path, quantization: str = "none", threads: int = 2) -> CompiledModel:
    files = open_model(path)
    model = CompiledModel(load_library(), files.config, quantization, threads, max_rank=64)
    load_compiled(model, files, unseen)
    model.finish(
        cos_sin_table(files.config, files.config.max_position_embeddings),
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_tokens=MAX_TOKENS,
    )
    return model


def load(model: CpuModel, *adapters: Path) -> None:
    """Load ``adapters`` with the numbers from 1 on."""
    for number, path in enumerate(adapters, 1):
        answer = model.adapters.load({"number": number, "path": str(path), "checksum": ""})
        assert "error" not in answer, answer


class Sequences:
    """Sequences in a model's cache, computed together or not."""

    def __init__(self, model: CpuModel) -> None:
        self._model = model
        self._slots = SlotTable(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=512, vocab_size=300
        )
        self._slots.adapters = model.adapters
        self._plans = 0
        self._pages = 0

    def prefill(self, prompts: Sequence[tuple[Sequence[int], int]], first: int = 0) -> Logits:
        """Return the logits [R, V] after each prompt with its adapter; slots from ``first`` on."""
        opened = []
        for number, (prompt, adapter) in enumerate(prompts, first):
            pages = range(self._pages, self._pages + len(prompt) // PAGE_SIZE + 1)
            self._pages = pages.stop
            opened.append(
                OpenSlot(
                    slot=number,
                    generation=1,
                    tokens=from_ints(prompt),
                    prompt_length=len(prompt),
                    computed=0,
                    pages=from_ints(pages),
                    sampler=GREEDY,
                    adapter=adapter,
                )
            )
        return self._compute(
            opened, [each.slot for each in opened], [len(prompt) for prompt, _ in prompts]
        )

    def decode(self, numbers: Sequence[int], token: int) -> Logits:
        """Return the logits after one more token, ``token``, in each of the slots."""
        for number in numbers:
            slot = self._slots[number]
            slot.settle(slot.extend(), token)
        return self._compute([], numbers, [1] * len(numbers))

    def _compute(
        self, opened: list[OpenSlot], numbers: Sequence[int], counts: Sequence[int]
    ) -> Logits:
        self._plans += 1
        plan = Plan(
            number=self._plans,
            opened=opened,
            row_slots=from_ints(numbers),
            row_counts=from_ints(counts),
        )
        rows = self._slots.apply(plan)
        hidden, ends = self._model.forward(rows, self._slots)
        for row in rows:
            row.slot.computed = row.end
        return self._model.logits(hidden, ends).copy()


def all_logits(model: CpuModel, prompt: Sequence[int], adapter: int) -> Logits:
    """Return the logits [T, V] after every token of ``prompt``."""
    prefixes = [(prompt[: end + 1], adapter) for end in range(len(prompt))]
    return np.concatenate([Sequences(model).prefill([each]) for each in prefixes])


def exact_logits(path: Path, adapter: Path, prompt: Sequence[int]) -> Logits:
    """Return the logits of PEFT over transformers, in float32."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.inference_mode():
        logits: Logits = model(torch.tensor([list(prompt)])).logits[0].float().numpy()
    return logits


def room(path: Path, prompt: Sequence[int], logits: Logits) -> float:
    """Bound the distance of two computations of ``logits``; adapters at most double the terms."""
    return apart(2 * terms_of_folder(path, len(prompt)), logits)


def distance(logits: Logits, exact: Logits) -> float:
    """Root mean square of the difference, as a part of the logits' own spread."""
    difference = logits.astype(np.float64) - exact
    return float(np.sqrt(np.square(difference).mean()) / exact.std())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = np.random.default_rng(seed)
    tokens: list[int] = draw.integers(3, 300, length).tolist()
    return tokens


@pytest.mark.parametrize("family", ["llama3", "smollm3", "mistral", "qwen2", "qwen3"])
def test_torch_gives_peft_s_logits(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path / "model")
    plain = make_adapter(path, tmp_path / "plain", seed=1)
    pattern = make_adapter(
        path,
        tmp_path / "pattern",
        seed=2,
        rank=6,
        ranks={"mlp.up_proj": 9, "self_attn.k_proj": 2},
        use_rslora=True,
        alpha_pattern={"layers.1.self_attn.q_proj": 3, "down_proj": 16},
        dtype=np.float16,
    )
    model = with_torch(path)
    load(model, plain, pattern)
    prompt = prompt_of(30)
    for number, adapter in ((1, plain), (2, pattern)):
        exact = exact_logits(path, adapter, prompt)
        error = np.abs(all_logits(model, prompt, number) - exact).max()
        assert error < room(path, prompt, exact)
        assert distance(all_logits(model, prompt, 0), exact) > 0.3  # else this would say nothing


def test_torch_gives_peft_s_logits_with_phi_3(tmp_path: Path) -> None:
    path = make_tiny("phi3", tmp_path / "model")
    adapter = make_adapter(path, tmp_path / "adapter", seed=1)
    model = with_torch(path)
    load(model, adapter)
    prompt = prompt_of(70)
    exact = exact_logits(path, adapter, prompt)
    assert np.abs(all_logits(model, prompt, 1) - exact).max() < room(path, prompt, exact)
    assert distance(all_logits(model, prompt, 0), exact) > 0.3  # else this would say nothing


@pytest.mark.parametrize("numbers", [[0, 1, 2, 0, 2, 1, 1], [2, 2, 1], [1], [0, 0]])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("compiled", marks=needs_kernels)])
def test_together_is_as_alone(kernels: str, numbers: list[int], tmp_path: Path) -> None:
    """By the compiled kernels bit for bit; torch's products round other shapes differently."""
    path = make_tiny("llama2", tmp_path / "model", head_dim=32)
    adapters = [
        make_adapter(path, tmp_path / "first", seed=1, rank=4),
        make_adapter(path, tmp_path / "second", seed=2, rank=24, parts=("self_attn.k_proj",)),
    ]
    prompts = [
        (prompt_of(3 + 7 * place, seed=place), number) for place, number in enumerate(numbers)
    ]
    model = with_torch(path) if kernels == "torch" else compiled(path)
    load(model, *adapters)
    together, slots = Sequences(model), range(len(prompts))
    first, second = together.prefill(prompts), together.decode(slots, 7)
    for place, prompt in enumerate(prompts):
        alone = Sequences(model)
        pair = alone.prefill([prompt])[0], alone.decode([0], 7)[0]
        for got, expected in zip((first[place], second[place]), pair, strict=True):
            if kernels == "compiled":
                assert np.array_equal(got, expected)
            else:
                assert np.abs(got - expected).max() < room(path, prompt, expected)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - EXPERT_FAMILIES))
def test_compiled_is_as_near_to_the_exact_logits_as_merged_weights(
    family: str, threads: int, tmp_path: Path
) -> None:
    path = make_tiny(family, tmp_path / "model", head_dim=32, torch_dtype="bfloat16")
    adapter = make_adapter(path, tmp_path / "adapter", seed=4, rank=16, alpha=12)
    prompt = prompt_of(60)
    exact = exact_logits(path, adapter, prompt)[-1:]
    merged = Sequences(compiled(merge(path, adapter, tmp_path / "merged"))).prefill([(prompt, 0)])
    model = compiled(path, threads=threads)
    load(model, adapter)
    got = Sequences(model).prefill([(prompt, 1)])
    assert distance(got, exact) < 1.5 * distance(merged, exact) + 0.01
    assert distance(merged, exact) < 0.15


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_rounded_weights_take_adapters(quantization: str, tmp_path: Path) -> None:
    path = make_tiny("llama2", tmp_path / "model", head_dim=32)
    adapter = make_adapter(path, tmp_path / "adapter", seed=4, rank=16, alpha=12)
    prompt = prompt_of(40)
    exact = exact_logits(path, adapter, prompt)[-1:]
    model = compiled(path, quantization)
    load(model, adapter)
    assert distance(Sequences(model).prefill([(prompt, 1)]), exact) < 0.1


def test_a_gguf_file_s_rows_are_in_the_adapter_s_order(tmp_path: Path) -> None:
    """llama.cpp's files have the rows of queries and keys in another order than PEFT's."""
    path = make_tiny("llama2", tmp_path / "model")
    parts = ("self_attn.q_proj", "self_attn.k_proj")
    adapter = make_adapter(path, tmp_path / "adapter", seed=4, parts=parts)
    model = with_torch(write_gguf(path, tmp_path / "model.gguf"))
    load(model, adapter)
    prompt = prompt_of(30)
    exact = exact_logits(path, adapter, prompt)
    assert np.abs(all_logits(model, prompt, 1) - exact).max() < room(path, prompt, exact)


def test_a_slot_with_an_adapter_that_isn_t_here(tmp_path: Path) -> None:
    model = with_torch(make_tiny("llama2", tmp_path))
    with pytest.raises(PlanError, match="slot 0 has adapter 3, which isn't here"):
        Sequences(model).prefill([([5, 6], 3)])
