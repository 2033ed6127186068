"""Loads the model that the engine's Start message asks for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from gpu.constraints.adjuster import Constraints
from gpu.constraints.lazy_grammars import LazyGrammars
from gpu.constraints.processors import (
    NamedProcessor,
    Processors,
    load_processor,
    load_processors,
)
from gpu.cpu.rank_processes import rank_pids
from gpu.loading.devices import bind_to_cores, choose_device, choose_dtype
from gpu.loading.loaded_model import (
    Loaded,
    OnProgress,
    Serving,
    choose_num_threads,
    option_that_moves_pages,
    warm_up,
)
from gpu.loading.page_transfers import PageTransfers
from gpu.mock import MockExecutor, mock_num_pages, mock_text
from gpu.models.rope import inverse_frequencies
from gpu.runner import Runner
from gpu.slots import SlotTable
from gpu.weights.replacement import open_files, weights_for
from trioserve.model_files import (
    ENCODING,
    ModelConfig,
    ModelFiles,
    TransformersConfig,
    task_of,
)
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.logits_processors import ProcessorContext
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import MockSteps, Ready, Start

DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "cuda": 2048, "mock": 2048}
MAX_MASK_THREADS = 8
WARM_UP_TOKENS = 16


def load(start: Start, on_progress: OnProgress) -> Serving:
    """Load a model within the limits of ``start`` and compute a short prompt as a warm-up.

    Raises:
        ModelLoadError: the model can't be loaded or served; one line says why and what to do.
    """
    if task_of(Path(start.model)) in ENCODING:
        _refuse_for_encoders(start)
        from gpu.models.encoder.serving import load_encoder_to_serve  # needs torch

        return load_encoder_to_serve(start, on_progress)
    device = choose_device(start.device, start.num_ranks)
    if device == "cpu":
        bind_to_cores(start.cores)
    kind = "mock" if start.mock is not None else device.partition(":")[0]
    files = open_files(start)
    of_whole_stages = start.pipeline_parallel_size % start.num_nodes == 0
    compiled = not isinstance(files.config, TransformersConfig) and of_whole_stages
    dtype = choose_dtype(start.dtype, device, compiled)
    # From here on every limit but the number of pages is set.
    start = attrs.evolve(
        start,
        max_model_len=choose_max_model_len(start.max_model_len, files.config),
        max_num_batched_tokens=start.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[kind],
    )
    _refuse_options(start, kind, files)
    calls_beside = _load_tower(start, files, device, dtype, on_progress)
    if files.speech is not None and start.mock is None:
        from gpu.models.transformers_models.speech.loading import fit_slots

        start = fit_slots(start, files.speech, dtype)
    grammars = LazyGrammars(Path(start.model), start.tokenizer)
    loading_grammars = threading.Thread(target=grammars.load, daemon=True)
    if start.has_grammars:
        loading_grammars.start()
    constraints = _load_constraints(start, files, device, grammars)
    loaded = _load_on(device, start, files, dtype, on_progress, constraints)
    _run_a_prompt(loaded, start, on_progress)
    if start.has_grammars:
        loading_grammars.join()
    runner = Runner(
        loaded.executor, loaded.slots, max_num_batched_tokens=start.max_num_batched_tokens
    )
    ready = _ready(start, files, loaded, kind, dtype)
    weights = loaded.make_weights(functools.partial(weights_for, files), loaded.read_weights)
    return Serving(
        transfers=_open_transfers(start, files, loaded, ready),
        runner=runner,
        weights=weights,
        constraints=constraints,
        adapters=loaded.adapters,
        calls_beside={**calls_beside, **loaded.calls_beside},
        ready=ready,
    )


def _load_tower(
    start: Start, files: ModelFiles, device: str, dtype: str, on_progress: OnProgress
) -> dict[str, Callable[[Any], Any]]:
    """Return the calls of a model that reads images or speech; none for others."""
    if start.mock is not None:
        return {}
    if files.media is None and files.speech is None:
        return {}
    if files.speech is not None:
        from gpu.models.transformers_models.speech.loading import check_served

        check_served(start, files, device)
    on_progress("tower", 0, 1)
    encode: Callable[[Any], Any]
    if device == "cpu":
        from gpu.models.transformers_models.tower_process import TowerOrder, TowerProcess

        threads = choose_num_threads(start.num_threads)
        encode = TowerProcess(TowerOrder(model=start.model, dtype=dtype, num_threads=threads))
    else:
        import torch

        from gpu.models.media.encoding import EncodeMedia
        from gpu.models.media.tower import MediaTower

        kind = getattr(torch, dtype)
        encode = EncodeMedia(MediaTower.load(files, kind, torch.device(device)), kind)
    on_progress("tower", 1, 1)
    return {"encode_media": encode}


def _refuse_for_encoders(start: Start) -> None:
    for option, is_given in (
        ("--speculative-config", start.speculative is not None),
        (_ranks_option(start), start.num_ranks > 1),
        ("--tensor-parallel-slices", start.tensor_parallel_slices > 1),
        ("--process-memory-limit", start.process_memory_limit > 0),
    ):
        if is_given:
            raise ModelLoadError(f"{option} is for models that generate: leave it out")


def _ready(start: Start, files: ModelFiles, loaded: Loaded, kind: str, dtype: str) -> Ready:
    return Ready(
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
        lends_pages=loaded.lends_pages,
        max_row_tokens=loaded.max_row_tokens,
        num_stages=loaded.num_stages,
        embedding_width=loaded.slots.embedding_width,
        kv_shape=list(loaded.slots.kv_format.shape) if loaded.slots.kv_format else [],
        hidden_size=_head_inputs(files),
        free_memory=loaded.free_memory,
        warning=loaded.warning,
        rank_pids=rank_pids(),
    )


def _head_inputs(files: ModelFiles) -> int:
    """Return the numbers of a hidden state that the head takes; OPT has a smaller one there."""
    config = files.config
    shape = config.shape if isinstance(config, TransformersConfig) else {}
    return int(shape.get("word_embed_proj_dim") or config.hidden_size)


def _open_transfers(
    start: Start, files: ModelFiles, loaded: Loaded, ready: Ready
) -> PageTransfers | None:
    """Return the transfers of pages to other workers, and to the folder that is asked for.

    They go through the host's memory, so there are none without.

    Raises:
        ModelLoadError: The folder can't be used.
    """
    if not loaded.num_host_pages or not loaded.lends_pages:
        return None
    config, rotation = files.config, b""
    if isinstance(config, ModelConfig):  # It may depend on the longest sequence.
        rotation = inverse_frequencies(config, start.max_model_len)[0].tobytes()
    # What decides the bits of a page, besides weights and tokens.
    numbers = (ready.dtype, start.kv_cache_dtype, start.page_size)
    parts = (config, rotation, loaded.arithmetic, *numbers)
    transfers = PageTransfers(
        executor=loaded.executor,
        parts=parts,
        root=Path(start.kv_offloading_dir) if start.kv_offloading_dir else None,
        max_bytes=start.kv_offloading_dir_bytes,
    )
    try:
        transfers.use(ready.model_checksum)
    except OSError as error:
        raise ModelLoadError(f"--kv-offloading-dir can't be used: {error}") from error
    return transfers


def _refuse_options(start: Start, kind: str, files: ModelFiles) -> None:
    """Refuse options that aren't served on a device of this ``kind``."""
    if kind == "cuda" and start.quantization not in ("auto", "none"):
        raise ModelLoadError(
            f"--quantization {start.quantization} is for a CPU: leave it out, or use --device cpu"
        )
    if start.enable_expert_parallel and (
        start.tensor_parallel_size == 1
        or isinstance(files.config, TransformersConfig)
        or files.config.experts is None
    ):
        raise ModelLoadError(
            "--enable-expert-parallel is for models with experts and for several ranks "
            "(--tensor-parallel-size): leave it out"
        )
    _refuse_with_ranks(start, kind, files)
    if start.speculative is None:
        return
    if kind == "mock" or isinstance(files.config, TransformersConfig):
        raise ModelLoadError(
            "--speculative-config is for models of this server's own kernels: leave it out"
        )
    quantization = start.speculative.quantization
    if kind == "cuda" and quantization not in ("auto", "none"):
        raise ModelLoadError(
            f"speculative_config: quantization {quantization} is for a CPU: leave it out, or use "
            "--device cpu"
        )


def _refuse_with_ranks(start: Start, kind: str, files: ModelFiles) -> None:
    """Refuse what several ranks don't serve, or slices of their sums, or a limit of memory."""
    size, slices = start.num_ranks, start.tensor_parallel_slices
    of_slices = size == 1 or (kind == "cuda" and slices > 1)
    option = f"--tensor-parallel-slices {slices}" if of_slices else _ranks_option(start)
    own = kind in (("cpu",) if of_slices else ("cpu", "cuda"))
    if max(size, slices) > 1 and not (own and isinstance(files.config, ModelConfig)):
        where = " on a CPU" if of_slices else ""
        raise ModelLoadError(f"{option} is for models of this server's own decoders{where}")
    if start.process_memory_limit and not (kind == "cpu" and isinstance(files.config, ModelConfig)):
        raise ModelLoadError(
            "--process-memory-limit is for models of this server's own decoders on a CPU"
        )
    if start.process_memory_limit and start.speculative is not None and start.speculative.model:
        raise ModelLoadError(
            "--process-memory-limit doesn't go with a draft model: leave one of them out"
        )
    if size % start.num_nodes:
        raise ModelLoadError(
            f"--nnodes {start.num_nodes} doesn't divide the engine's {option}: both sides need "
            "ranks for each host"
        )
    if start.num_nodes > 1 and kind != "cpu":
        raise ModelLoadError("--nnodes is for CPUs: leave it out, or use --device cpu")
    if size == 1:
        return
    if kind == "cuda" and (other := option_that_moves_pages(start)):
        raise ModelLoadError(f"{option} doesn't go with {other} on a GPU: leave one of them out")
    if start.speculative is not None and kind != "cpu":
        raise ModelLoadError(
            f"{option} doesn't go with --speculative-config: leave one of them out"
        )
    of_sums = start.tensor_parallel_size
    if kind == "cuda" and start.deterministic and of_sums > 1:
        # NCCL's order depends on the size of the batch.
        raise ModelLoadError(
            f"--tensor-parallel-size {of_sums} doesn't go with --deterministic on a GPU: leave "
            "one of them out"
        )


def _ranks_option(start: Start) -> str:
    """Return the option that asks for several ranks, with its number."""
    if start.pipeline_parallel_size > 1:
        return f"--pipeline-parallel-size {start.pipeline_parallel_size}"
    return f"--tensor-parallel-size {start.tensor_parallel_size}"


def _load_on(
    device: str,
    start: Start,
    files: ModelFiles,
    dtype: str,
    on_progress: OnProgress,
    constraints: Constraints,
) -> Loaded:
    """Load the model for ``device`` with the loader that serves it there."""
    if start.mock is not None:
        return _load_mock(start, start.mock, files)
    if files.speech is not None:
        from gpu.models.transformers_models.speech.loading import load_speech

        return load_speech(start, files, dtype, on_progress, constraints)
    if isinstance(files.config, TransformersConfig):
        from gpu.models.transformers_models.loading import load_through_transformers

        return load_through_transformers(start, files, dtype, device, on_progress, constraints)
    if device != "cpu":
        from gpu.cuda.loading import load_on_gpu  # needs CuPy

        return load_on_gpu(start, files, dtype, device, on_progress, constraints)
    threads = choose_num_threads(start.num_threads)
    from gpu.cpu.loading import load_on_cpu

    return load_on_cpu(start, files, dtype, threads, on_progress, constraints)


def _load_constraints(
    start: Start, files: ModelFiles, device: str, grammars: LazyGrammars
) -> Constraints:
    """Load the operator's logits processors; return the constraints with them."""
    context = ProcessorContext(
        vocab_size=files.config.vocab_size,
        max_num_seqs=start.max_num_seqs,
        device=device,
        model=start.model,
    )
    own = load_processors(start.logits_processors, context)
    if files.speech is not None:
        from gpu.models.transformers_models.speech.rules import SpeechRules

        own.append(NamedProcessor("of speech", SpeechRules(files.speech)))
    processors = Processors(
        own,
        lambda name: load_processor(name, context, "logits_processors"),
    )
    return Constraints(
        files.config.vocab_size,
        grammars,
        processors,
        num_threads=min(max(int(Machine().cores()), 1), MAX_MASK_THREADS),
    )


def _run_a_prompt(loaded: Loaded, start: Start, on_progress: OnProgress) -> None:
    on_progress("warm-up", 0, 1)
    room = min(loaded.num_pages * start.page_size, start.max_model_len)
    num_tokens = min(WARM_UP_TOKENS, room, start.max_num_batched_tokens)
    warm_up(loaded.executor, loaded.slots, [num_tokens], start.page_size)
    on_progress("warm-up", 1, 1)


def _load_mock(start: Start, steps: MockSteps, files: ModelFiles) -> Loaded:
    """Return a model that computes nothing, with as many pages as a GPU might have."""
    config = files.config
    num_pages = start.num_pages or mock_num_pages(
        start.page_size, start.max_model_len, start.max_num_seqs
    )
    num_host_pages = num_pages if start.kv_offloading_bytes else 0
    return Loaded(
        executor=MockExecutor(steps, mock_text(files, config.eos_token_ids)),
        slots=SlotTable(
            num_pages=num_pages,
            page_size=start.page_size,
            max_model_len=start.max_model_len,
            vocab_size=config.vocab_size,
            num_host_pages=num_host_pages,
            embedding_width=config.hidden_size,
        ),
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        device_name="a mock worker, which computes nothing",
        computing="nothing",
        read_weights=lambda _: lambda: None,
    )


def choose_max_model_len(asked: int, config: ModelConfig | TransformersConfig) -> int:
    """Return the longest sequence to serve, in tokens; ``asked`` is 0 for the model's own limit.

    Raises:
        ModelLoadError: ``asked`` is more than the model supports.
    """
    longest = config.max_position_embeddings
    scaling = config.rope_scaling if isinstance(config, ModelConfig) else None
    if scaling is not None and scaling.kind == "dynamic":
        longest = int(longest * scaling.factor)
    if scaling is not None and scaling.kind == "longrope":
        longest = scaling.long_positions
    if asked > longest:
        raise ModelLoadError(
            f"--max-model-len {asked} is more than this model's {longest} positions: lower it"
        )
    return asked or config.max_position_embeddings
