"""From the engine's Start message to a runner that is ready for plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from gpu.constraints.adjuster import Constraints
from gpu.constraints.lazy_grammars import LazyGrammars
from gpu.constraints.processors import Processors, load_processors
from gpu.devices import choose_device, choose_dtype
from gpu.exchange import ModelWeights, ReadWeights
from gpu.executor import Executor
from gpu.lora.store import AdapterStore
from gpu.mock import MockExecutor, mock_num_pages, mock_text
from gpu.runner import Runner
from gpu.slots import SlotTable
from gpu.weights.replacement import weights_for
from trioserve.errors import ModelLoadError
from trioserve.logits_processors import ProcessorContext
from trioserve.machine import Machine
from trioserve.model_files import (
    ModelConfig,
    ModelFiles,
    TransformersConfig,
    open_model,
    task_of,
)
from trioserve.sampling import SamplerParams
from trioserve.wire import MockSteps, OpenSlot, Plan, Ready, Start, from_ints

__all__ = [
    "Loaded",
    "OnProgress",
    "Serving",
    "choose_max_model_len",
    "choose_num_threads",
    "load",
    "of_weights",
    "unseen",
    "warm_up",
]

DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048, "mock": 2048}
MAX_MASK_THREADS = 8
MOST_THREADS = 1024
"""As many as ``--num-threads`` may ask for."""
WARM_UP_TOKENS = 16

OnProgress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""


def of_weights(on_progress: OnProgress) -> Callable[[int, int], None]:
    """``on_progress`` for the stage in which weights are read."""
    return lambda done, total: on_progress("weights", done, total)


def unseen(stage: str, done: int, total: int) -> None:
    """An :data:`OnProgress` that nobody looks at."""


@attrs.frozen(kw_only=True)
class Loaded:
    """A model on a device, with its KV cache."""

    executor: Executor
    slots: SlotTable
    num_pages: int
    device_name: str
    computing: str
    """What computes, and with which weights: a few words for the log."""
    read_weights: ReadWeights
    adapters: AdapterStore[Any] | None = None
    """Those that sequences may have; None where no adapters can be served."""
    num_host_pages: int = 0
    """Places for pages of the KV cache in the host's memory."""
    free_memory: int = 0
    """Bytes of the GPU's memory that were free before."""


@attrs.frozen(kw_only=True)
class Serving:
    """A loaded model that is ready for plans, and what the engine is told of it."""

    runner: Runner
    weights: ModelWeights | None
    """None where they can't be exchanged."""
    constraints: Constraints | None
    """None where nothing is drawn."""
    ready: Ready
    adapters: AdapterStore[Any] | None = None
    """None where none can be served."""
    calls: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    """What this model can be called for, by name: functions of the arguments."""


def load(start: Start, on_progress: OnProgress) -> Serving:
    """Load a model within the limits of ``start`` and run one prompt through it.

    ``on_progress`` is called often.

    Raises:
        ModelLoadError: the model can't be loaded or served so; one line says why and what to do.
    """
    if task_of(Path(start.model)) != "generate":
        from gpu.encoder.serving import load_encoder_to_serve  # needs torch

        return load_encoder_to_serve(start, on_progress)
    device = choose_device(start.device)
    dtype = choose_dtype(start.dtype, device)
    kind = "mock" if start.mock is not None else device.partition(":")[0]
    files = open_model(Path(start.model), start.model_impl)
    if start.weights:
        files = weights_for(files, Path(start.weights))
    # From here on every limit is a number: nothing is left to be chosen but the number of pages.
    start = attrs.evolve(
        start,
        max_model_len=choose_max_model_len(start.max_model_len, files.config),
        max_num_batched_tokens=start.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[kind],
    )
    if device != "cpu" and start.quantization not in ("auto", "none"):
        raise ModelLoadError(
            f"--quantization {start.quantization} is for a CPU: leave it out, or use --device cpu"
        )
    constraints = _load_constraints(start, files, device)
    loaded = _load_on(device, start, files, dtype, on_progress, constraints)
    on_progress("warm-up", 0, 1)
    room = min(loaded.num_pages * start.page_size, start.max_model_len)
    num_tokens = min(WARM_UP_TOKENS, room, start.max_num_batched_tokens)
    warm_up(loaded.executor, loaded.slots, [num_tokens], start.page_size)
    on_progress("warm-up", 1, 1)
    runner = Runner(
        loaded.executor, loaded.slots, max_num_batched_tokens=start.max_num_batched_tokens
    )
    ready = Ready(
        model_checksum=files.checksum(),
        device=kind,
        device_name=loaded.device_name,
        computing=loaded.computing,
        dtype=dtype,
        num_pages=loaded.num_pages,
        page_size=start.page_size,
        vocab_size=files.config.vocab_size,
        max_model_len=start.max_model_len,
        max_num_seqs=start.max_num_seqs,
        max_num_batched_tokens=start.max_num_batched_tokens,
        num_host_pages=loaded.num_host_pages,
        free_memory=loaded.free_memory,
    )
    weights = ModelWeights(files, loaded.read_weights)
    return Serving(
        runner=runner,
        weights=weights,
        constraints=constraints,
        adapters=loaded.adapters,
        ready=ready,
    )


def _load_on(
    device: str,
    start: Start,
    files: ModelFiles,
    dtype: str,
    on_progress: OnProgress,
    constraints: Constraints,
) -> Loaded:
    """The model on ``device``, by what computes it there; ``start`` has every limit."""
    if start.mock is not None:
        return _load_mock(start, start.mock, files)
    if isinstance(files.config, TransformersConfig):
        from gpu.transformers_models.loading import load_through_transformers

        return load_through_transformers(start, files, dtype, device, on_progress, constraints)
    if device != "cpu":
        from gpu.cuda.loading import load_on_gpu  # needs CuPy

        return load_on_gpu(start, files, dtype, device, on_progress, constraints)
    from gpu.cpu.loading import load_on_cpu

    threads = choose_num_threads(start.num_threads)
    return load_on_cpu(start, files, dtype, threads, on_progress, constraints)


def _load_constraints(start: Start, files: ModelFiles, device: str) -> Constraints:
    """Grammars and the user's logits processors."""
    context = ProcessorContext(
        vocab_size=files.config.vocab_size,
        max_num_seqs=start.max_num_seqs,
        device=device,
        model=start.model,
    )
    processors = Processors(load_processors(start.logits_processors, context))
    return Constraints(
        files.config.vocab_size,
        LazyGrammars(Path(start.model), start.tokenizer),
        processors,
        num_threads=min(max(int(Machine().cores()), 1), MAX_MASK_THREADS),
    )


def _load_mock(start: Start, steps: MockSteps, files: ModelFiles) -> Loaded:
    """Everything but the model: a limit on tokens in a step, and pages, as a GPU would have."""
    config = files.config
    num_pages = start.num_pages or mock_num_pages(
        start.page_size, start.max_model_len, start.max_num_seqs
    )
    return Loaded(
        executor=MockExecutor(steps, mock_text(files, config.eos_token_ids)),
        slots=SlotTable(
            num_pages=num_pages,
            page_size=start.page_size,
            max_model_len=start.max_model_len,
            vocab_size=config.vocab_size,
        ),
        num_pages=num_pages,
        device_name="a mock worker, which computes nothing",
        computing="nothing",
        read_weights=lambda _: lambda: None,
    )


def choose_num_threads(asked: int) -> int:
    """How many threads compute; 0 asks for OMP_NUM_THREADS, or all cores that may be used."""
    # That variable may be a list, of which the first is for the outermost level.
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked == 0 and told.isdecimal():
        asked = min(int(told), MOST_THREADS)
    return asked or max(int(Machine().cores()), 1)


def choose_max_model_len(asked: int, config: ModelConfig | TransformersConfig) -> int:
    """The longest sequence to serve; ``asked`` is 0 for the model's own.

    Raises:
        ModelLoadError: more than the model can do.
    """
    longest = config.max_position_embeddings
    scaling = config.rope_scaling if isinstance(config, ModelConfig) else None
    if scaling is not None and scaling.kind == "dynamic":
        longest = int(longest * scaling.factor)
    if asked > longest:
        raise ModelLoadError(
            f"--max-model-len {asked} is more than this model's {longest} positions: lower it"
        )
    return asked or config.max_position_embeddings


def warm_up(
    executor: Executor, slots: SlotTable, prompt_lengths: Sequence[int], page_size: int
) -> None:
    """Prefill and sample prompts in one step, so that libraries load and allocate beforehand.

    ``slots`` is left empty.
    """
    opened = []
    first_page = 0
    for slot, length in enumerate(prompt_lengths):
        num_pages = -(-length // page_size)
        opened.append(
            OpenSlot(
                slot=slot,
                generation=0,
                tokens=from_ints([0] * length),
                prompt_length=length,
                computed=0,
                pages=from_ints(range(first_page, first_page + num_pages)),
                sampler=SamplerParams(temperature=0.0),
            )
        )
        first_page += num_pages
    plan = Plan(
        number=1,
        opened=opened,
        row_slots=from_ints(range(len(opened))),
        row_counts=from_ints(prompt_lengths),
    )
    Runner(executor, slots, max_num_batched_tokens=sum(prompt_lengths)).step(plan)
    slots.clear()
    for each in opened:
        executor.close(each.slot)
