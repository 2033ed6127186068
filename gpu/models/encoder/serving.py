"""Serves an encoder: it runs no plans, but answers the call ``encode``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np
import torch

from gpu.executor import NO_COPIES, Copies, Submission
from gpu.loading.devices import bind_to_cores, choose_device
from gpu.loading.loaded_model import Serving, choose_num_threads, of_weights
from gpu.loading.weight_swap import ModelWeights
from gpu.models.encoder.loading import load_encoder
from gpu.models.encoder.model import Encoder
from gpu.runner import Runner
from gpu.slots import PlanError, Row, Slot, SlotTable
from gpu.weights.replacement import encoder_weights_for
from trioserve.model_files import EncoderConfig, EncoderFiles, open_encoder
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import Ready, Start, from_floats, ints

DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 16384}
"""About a tenth of a second of a small model on a CPU; the next call waits as long."""

_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float16", "bfloat16", "float32")}
"""Supported dtypes of each device; ``auto`` is the first."""


def load_encoder_to_serve(start: Start, on_progress: Callable[[str, int, int], None]) -> Serving:
    """Load an encoder within the limits of ``start`` and compute a short text as a warm-up.

    Raises:
        ModelLoadError: the model can't be loaded or served; one line says why and what to do.
    """
    _check_options(start)
    device = choose_device(start.device)
    if device == "cpu":
        bind_to_cores(start.cores)
    kind = device.partition(":")[0]
    dtype = _choose_dtype(start.dtype, kind)
    files = open_encoder(Path(start.model))
    if start.weights:
        files = encoder_weights_for(files, Path(start.weights))
    max_length = _choose_max_length(start.max_model_len, files.config)
    threads = choose_num_threads(start.num_threads)
    if kind == "cpu":
        torch.set_num_threads(threads)
    load = functools.partial(load_encoder, dtype=getattr(torch, dtype), device=device)
    encode = _Encode(load(files, progress=of_weights(on_progress)), load)
    on_progress("warm-up", 0, 1)
    encode.warm_up()
    on_progress("warm-up", 1, 1)
    ready = Ready(
        model_checksum=files.checksum(),
        device=kind,
        device_name=Machine().cpu_name() if kind == "cpu" else torch.cuda.get_device_name(device),
        computing=f"torch, {threads} threads" if kind == "cpu" else "torch",
        dtype=dtype,
        num_pages=0,
        page_size=start.page_size,
        vocab_size=files.config.vocab_size,
        max_model_len=max_length,
        max_num_seqs=start.max_num_seqs,
        max_num_batched_tokens=start.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[kind],
    )
    slots = SlotTable(
        num_pages=0,
        page_size=start.page_size,
        max_model_len=max_length,
        vocab_size=files.config.vocab_size,
    )
    runner = Runner(_NoSteps(), slots, max_num_batched_tokens=ready.max_num_batched_tokens)
    return Serving(
        runner=runner,
        weights=ModelWeights(functools.partial(encoder_weights_for, files), encode.read_weights),
        constraints=None,
        ready=ready,
        calls={"encode": encode},
    )


def _check_options(start: Start) -> None:
    if start.mock is not None:
        raise ModelLoadError("a mock worker has outputs only: it is for models that generate")
    if start.quantization not in ("auto", "none"):
        raise ModelLoadError(
            f"--quantization {start.quantization} isn't served for an encoder: leave it out"
        )
    if start.logits_processors:
        raise ModelLoadError("--logits-processors are for models that generate: leave them out")


def _choose_dtype(name: str, kind: str) -> str:
    served = _DTYPES[kind]
    if name == "auto":
        return served[0]
    if name not in served:
        raise ModelLoadError(
            f"{name} isn't served for an encoder on this device: use one of {', '.join(served)}"
        )
    return name


def _choose_max_length(asked: int, config: EncoderConfig) -> int:
    if asked > config.max_length:
        raise ModelLoadError(
            f"--max-model-len {asked} is more than this model's {config.max_length} tokens: "
            "lower it"
        )
    return asked or config.max_length


@attrs.define(eq=False)
class _Encode:
    """The call ``encode``.

    Its arguments are int32 columns: ``ids`` and ``type_ids`` of N texts, concatenated, and their
    ``lengths``. It returns a float32 column [N, num_outputs].
    """

    _encoder: Encoder
    _load: Callable[..., Encoder]

    def warm_up(self) -> None:
        """Compute the shortest possible text."""
        self._encoder.run([np.zeros(1, dtype=np.int32)], [np.zeros(1, dtype=np.int32)])

    def read_weights(self, files: EncoderFiles) -> Callable[[], None]:
        """Read other weights; return a function that swaps them in."""
        try:
            encoder = self._load(files, progress=lambda *_: None)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError("the device has no memory for other weights beside") from error

        def swap() -> None:
            self._encoder = encoder

        return swap

    def __call__(self, arguments: Any) -> bytes:
        ends = np.cumsum(ints(arguments["lengths"]))[:-1]
        ids = np.split(ints(arguments["ids"]), ends)
        type_ids = np.split(ints(arguments["type_ids"]), ends)
        return from_floats(self._encoder.run(ids, type_ids))


class _NoSteps:
    """The executor of a model that isn't computed in steps; no slot is ever opened."""

    completions = None

    def open(self, slot: Slot) -> NoReturn:
        """Raise."""
        raise PlanError("an encoder generates nothing", slot.number)

    def close(self, number: int) -> None:
        """Do nothing."""

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """Raise."""
        raise PlanError("an encoder generates nothing")
