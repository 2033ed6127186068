"""Loads a model through transformers, up to an executor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from gpu._util.errors import summarize
from gpu.cpu.cache_pages import choose_cpu_pages
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.loading import refuse_cache_format
from gpu.cpu.torch_loading import make_sampler
from gpu.cpu.torch_model import TorchModel
from gpu.loading.loaded_model import Loaded, OnProgress, choose_num_threads, unseen
from gpu.loading.weight_swap import ReadWeights
from gpu.models.transformers_models import interface
from gpu.models.transformers_models.attention import LayerShape, PagedLayers
from gpu.models.transformers_models.check import check_against_plain
from gpu.models.transformers_models.decoder import ImageModel, TransformersDecoder
from gpu.models.transformers_models.packing import pack, record_called_linears
from gpu.models.transformers_models.probing import probe_layers, refusal
from gpu.models.transformers_models.reading import read_model, version
from gpu.sampling.adjustments import Adjuster
from gpu.slots import SlotTable
from trioserve.model_files import ModelFiles, TransformersConfig
from trioserve.model_files.media_config import MediaConfig
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine, extra_advice
from trioserve.protocol.wire import Start


def load_through_transformers(
    start: Start,
    files: ModelFiles,
    dtype: str,
    device: str,
    on_progress: OnProgress,
    adjuster: Adjuster,
) -> Loaded:
    """Load a model with a KV cache; ``device`` has to be ``cpu``.

    See :func:`gpu.cpu.loading.load_on_cpu` for the other arguments.

    Raises:
        ModelLoadError: the model can't be served with these options; one line says why.
    """
    config = files.config
    assert isinstance(config, TransformersConfig)
    refuse_native_options(start, device, config)
    if files.media is not None:
        refuse_small_steps(start, files.media)
    require_library(config)
    torch.set_num_threads(choose_num_threads(start.num_threads))
    torch.set_float32_matmul_precision("highest")
    decoder, layers = _load(files, dtype, start.max_model_len, on_progress)
    per_token = sum(layer.numbers_per_token for layer in layers) * decoder.dtype.itemsize
    num_pages, num_host_pages = choose_cpu_pages(start, per_token * start.page_size)
    attention = PagedLayers(
        layers,
        page_size=start.page_size,
        num_pages=num_pages + num_host_pages,
        dtype=decoder.dtype,
    )
    model = (TorchModel if files.media is None else ImageModel)(decoder, attention)
    slots = SlotTable(
        num_pages=num_pages,
        page_size=start.page_size,
        max_model_len=start.max_model_len,
        vocab_size=config.vocab_size,
        num_host_pages=num_host_pages,
        embedding_width=decoder.model.get_input_embeddings().embedding_dim,
    )
    sampler = make_sampler(start, config.vocab_size)
    return Loaded(
        executor=CpuExecutor(model, sampler, slots, adjuster),
        slots=slots,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        device_name=Machine().cpu_name(),
        computing=f"{config.architecture} of transformers {version()}",
        read_weights=_weight_reader(model, layers, dtype, start.max_model_len),
    )


def refuse_native_options(start: Start, device: str, config: TransformersConfig) -> None:
    """Refuse options that only native models support.

    Raises:
        ModelLoadError: One was given.
    """
    reason = None
    if device != "cpu":
        reason = "no GPU: use --device cpu"
    elif start.max_lora_rank:
        reason = "no adapters: leave out --enable-lora"
    elif start.quantization not in ("auto", "none"):
        reason = f"no rounded weights: leave out --quantization {start.quantization}"
    elif start.deterministic:
        reason = "no order of operations that is the same in every batch: leave out --deterministic"
    if reason is not None:
        raise ModelLoadError(f"{config.architecture} is served through transformers, with {reason}")
    refuse_cache_format(start)


def refuse_small_steps(start: Start, media: MediaConfig) -> None:
    """Refuse steps without room for an image whose tokens come together.

    Raises:
        ModelLoadError: An image doesn't fit beside a token of each other sequence.
    """
    least = media.tokens_together + start.max_num_seqs - 1
    if media.tokens_together and start.max_num_batched_tokens < least:
        raise ModelLoadError(
            f"--max-num-batched-tokens {start.max_num_batched_tokens} must be at least {least}: a "
            f"step computes all {media.tokens_together} tokens of an image, beside a token of each "
            f"other sequence (--max-num-seqs {start.max_num_seqs})"
        )


def require_library(config: TransformersConfig) -> None:
    """Refuse a model without the library that computes it, and prepare the library.

    Raises:
        ModelLoadError: The library isn't installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelLoadError(
            f"{config.architecture} is served through transformers, which isn't installed: "
            + extra_advice("transformers")
        )
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    interface.register()


def _load(
    files: ModelFiles, dtype: str, longest: int, on_progress: OnProgress
) -> tuple[TransformersDecoder, list[LayerShape]]:
    """Return the model with its weights and the shapes of its layers, after checking its logits."""
    config = files.config
    assert isinstance(config, TransformersConfig)
    name = config.architecture
    try:
        has_tower = files.media is not None
        model = read_model(
            files.path, name, getattr(torch, dtype), on_progress, has_tower=has_tower
        )
        on_progress("check", 0, 1)
        decoder = TransformersDecoder(model)
        layers = probe_layers(decoder.body, name, model.config.get_text_config().num_hidden_layers)
        with record_called_linears(model) as products:
            check_against_plain(decoder, layers, config.vocab_size, longest)
        if products:
            for product in products:
                pack(product)
            check_against_plain(decoder, layers, config.vocab_size, longest)
        on_progress("check", 1, 1)
    except ModelLoadError:
        raise
    except Exception as error:  # transformers may raise anything
        raise refusal(name, f"can't be loaded from {files.path} ({summarize(error)})") from error
    return decoder, layers


def _weight_reader(
    model: TorchModel[PagedLayers], layers: list[LayerShape], dtype: str, longest: int
) -> ReadWeights:
    """Return the function that reads other weights for ``model``."""

    def read(files: ModelFiles) -> Callable[[], None]:
        decoder, others = _load(files, dtype, longest, unseen)
        assert others == layers  # the configurations are equal
        return lambda: model.replace_decoder(decoder)

    return read
