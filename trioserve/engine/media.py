"""Media and speech: what a process reads them with, and has their embeddings computed by."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from trioserve.config import EngineConfig
from trioserve.engine.loaded_model import LoadedModel
from trioserve.engine.schedulers import Schedulers
from trioserve.observability.metrics import Metrics
from trioserve.protocol.errors import EngineError, ModelLoadError
from trioserve.protocol.media_arrays import in_argument
from trioserve.protocol.wire import MAX_MESSAGE_BYTES
from trioserve.requests.media.embedding import MediaEmbedder
from trioserve.requests.media.encoder import MediaEncoder, WorkerMediaEncoder
from trioserve.requests.media.encoding import EncoderClient
from trioserve.requests.media.reader import MediaReader, open_media_reader
from trioserve.requests.speech.reader import SpeechReader
from trioserve.text.tokenizer_task import PromptMedia

_MOST_SENT = MAX_MESSAGE_BYTES // 2
"""Most bytes of a part's arrays in a message."""


@attrs.frozen(eq=False, kw_only=True)
class ModelMedia:
    """The media that a model reads: none without a ``reader``."""

    model: LoadedModel
    metrics: Metrics
    reader: MediaReader | None = None
    shares_memory: bool = True
    """True if the process that has the workers is on this host."""

    def embedder(self, encoder: MediaEncoder) -> PromptMedia | None:
        """Return what makes embeddings of media in prompts; None where they aren't served."""
        media = self.model.media
        if self.reader is None or media is None:
            return None
        return MediaEmbedder(
            reader=self.reader,
            client=EncoderClient(encoder, self.shares_memory),
            metrics=self.metrics,
            placeholders=media.token_ids,
            texts=media.texts,
            width=media.width,
            merge_size=media.merge_size,
            tokens_per_second=media.tokens_per_second,
            tokens_together=media.tokens_together,
            audio_depends_on_images=media.audio_depends_on_images,
        )

    def speech_reader(self, encoder: MediaEncoder) -> SpeechReader | None:
        """Return what reads speech; None for a model that doesn't transcribe."""
        speech = self.model.speech
        if self.reader is None or speech is None:
            return None
        client = EncoderClient(encoder, self.shares_memory)
        return SpeechReader(reader=self.reader, client=client, config=speech)


@contextlib.asynccontextmanager
async def open_media(
    config: EngineConfig,
    model: LoadedModel,
    path: Path,
    metrics: Metrics,
    *,
    shares_memory: bool = True,
) -> AsyncIterator[ModelMedia]:
    """Read the media of a model in the folder ``path``, if it reads any, within the block.

    ``shares_memory`` is that of :class:`ModelMedia`.

    Raises:
        ModelLoadError: The model's processor can't be used.
    """
    if model.media is None and model.speech is None:
        yield ModelMedia(model=model, metrics=metrics)
        return
    async with open_media_reader(config, processor_folder=path) as reader:
        yield ModelMedia(model=model, metrics=metrics, reader=reader, shares_memory=shares_memory)


def worker_encoder(
    config: EngineConfig, schedulers: Schedulers, metrics: Metrics
) -> WorkerMediaEncoder:
    """Return the encoder of the process that has the workers."""

    async def call(name: str, arguments: object) -> Any:
        async def given(is_far: bool) -> object:
            if not isinstance(arguments, bytes):
                return arguments
            if is_far:
                try:
                    sent = await trio.to_thread.run_sync(in_argument, arguments)
                except ModelLoadError as error:
                    raise EngineError(str(error)) from None
                if len(sent) > _MOST_SENT:
                    raise EngineError(
                        f"its {len(sent) >> 20} MiB are too many for a worker of another host, "
                        f"which gets {_MOST_SENT >> 20} MiB at most"
                    )
                return msgspec.Raw(sent)
            return msgspec.Raw(arguments)

        return await schedulers.call(name, given, one=True)

    return WorkerMediaEncoder(
        call=call,
        wait_attached=schedulers.wait_attached,
        count_workers=lambda: sum(each.attached for each in schedulers),
        max_bytes=int(config.mm_processor_cache_gb * 2**30),
        metrics=metrics,
    )
