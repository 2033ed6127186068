"""Loads a Whisper model's decoder, up to an executor and the call that aligns its text."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import torch

from gpu.cpu.cache_pages import choose_cpu_pages
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.torch_loading import make_sampler
from gpu.loading.loaded_model import Loaded, OnProgress, choose_num_threads
from gpu.models.linear import prepacks
from gpu.models.part_reading import read_part
from gpu.models.transformers_models.loading import refuse_native_options, require_library
from gpu.models.transformers_models.packing import pack
from gpu.models.transformers_models.reading import version
from gpu.models.transformers_models.speech.alignment import AlignSpeech
from gpu.models.transformers_models.speech.attention import HeardAudio, SpeechAttention
from gpu.models.transformers_models.speech.decoder import SpeechDecoder, SpeechModel
from gpu.sampling.adjustments import Adjuster
from gpu.slots import SlotTable
from trioserve.model_files import ModelFiles, TransformersConfig
from trioserve.model_files.speech_config import ARCHITECTURE, SpeechConfig
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import Start

AUDIO_SHARE = 0.5
"""Most of the free memory that the audio of slots may take."""

_log = logging.getLogger("gpu.loading")


def check_served(start: Start, files: ModelFiles, device: str) -> None:
    """Check that the model can be served with these options.

    Raises:
        ModelLoadError: It can't; one line says why.
    """
    assert isinstance(files.config, TransformersConfig)
    refuse_native_options(start, device, files.config)
    require_library(files.config)


def fit_slots(start: Start, speech: SpeechConfig, dtype: str) -> Start:
    """Return ``start`` with as many slots as have memory for the audio of each.

    Raises:
        ModelLoadError: There is no memory for one.
    """
    of_slot = audio_bytes(speech, dtype)
    free = int(Machine().memory()[1] // start.num_sharing * AUDIO_SHARE)
    fitting = min(start.max_num_seqs, free // of_slot)
    if not fitting:
        raise ModelLoadError(
            f"the audio of one transcript takes {of_slot >> 20} MiB, and {free >> 20} MiB of "
            "memory may be used for it: free some memory"
        )
    if fitting < start.max_num_seqs:
        _log.info(
            "%d transcripts are computed at a time, whose audio takes %d MiB each",
            fitting,
            of_slot >> 20,
        )
    return attrs.evolve(start, max_num_seqs=fitting)


def audio_bytes(speech: SpeechConfig, dtype: str) -> int:
    """Return the bytes of the keys and values of a window of audio in all layers."""
    itemsize: int = getattr(torch, dtype).itemsize
    return 2 * speech.num_layers * speech.numbers_of_audio * itemsize


def load_speech(
    start: Start, files: ModelFiles, dtype: str, on_progress: OnProgress, adjuster: Adjuster
) -> Loaded:
    """Load the decoder with a KV cache; see :func:`gpu.cpu.loading.load_on_cpu`.

    The memory for the audio of all slots of ``start`` is kept free.

    Raises:
        ModelLoadError: The model can't be loaded; one line says why.
    """
    speech = files.speech
    assert speech is not None
    torch.set_num_threads(choose_num_threads(start.num_threads))
    torch.set_float32_matmul_precision("highest")
    on_progress("weights", 0, 1)
    model = read_part(files, ARCHITECTURE, getattr(torch, dtype), without="encoder_layers")
    for module in list(model.modules()):
        if type(module) is torch.nn.Linear and prepacks(module.weight.dtype, module.weight.device):
            pack(module)
    on_progress("weights", 1, 1)
    decoder = SpeechDecoder(model)
    layers = decoder.layer_shapes
    per_token = sum(layer.numbers_per_token for layer in layers) * decoder.dtype.itemsize
    num_pages, num_host_pages = choose_cpu_pages(
        start,
        per_token * start.page_size,
        reserved=start.max_num_seqs * audio_bytes(speech, dtype),
    )
    attention = SpeechAttention(
        layers,
        HeardAudio(decoder.project, speech.num_states, speech.width, start.max_num_seqs),
        page_size=start.page_size,
        num_pages=num_pages + num_host_pages,
        dtype=decoder.dtype,
    )
    slots = SlotTable(
        num_pages=num_pages,
        page_size=start.page_size,
        max_model_len=start.max_model_len,
        vocab_size=files.config.vocab_size,
        num_host_pages=num_host_pages,
        embedding_width=speech.numbers_of_audio,
    )
    sampler = make_sampler(start, files.config.vocab_size)
    return Loaded(
        executor=CpuExecutor(SpeechModel(decoder, attention), sampler, slots, adjuster),
        slots=slots,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        device_name=Machine().cpu_name(),
        computing=f"Whisper of transformers {version()}",
        read_weights=_refuse_other_weights,
        calls_beside={"align_speech": AlignSpeech(decoder, speech)},
    )


def _refuse_other_weights(files: ModelFiles) -> Callable[[], None]:
    raise ModelLoadError("the weights of a model that transcribes speech can't be exchanged")
