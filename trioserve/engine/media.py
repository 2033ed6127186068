"""The media of prompts: what an engine reads them with, and has their embeddings computed by."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from trioserve.config import EngineConfig
from trioserve.engine.loaded_model import LoadedModel
from trioserve.engine.schedulers import Schedulers
from trioserve.observability.metrics import Metrics
from trioserve.requests.media.embedding import MediaEmbedder
from trioserve.requests.media.encoder import MediaEncoder, WorkerMediaEncoder
from trioserve.requests.media.reader import open_media_reader
from trioserve.text.tokenizer_task import EmbedMedia

OpenMedia = Callable[[MediaEncoder], EmbedMedia | None]
"""Returns what gives the embeddings of media, with an encoder; None where media aren't served."""


@contextlib.asynccontextmanager
async def open_media(
    config: EngineConfig, model: LoadedModel, path: Path, metrics: Metrics
) -> AsyncIterator[OpenMedia]:
    """Read the media of a model in the folder ``path``, if it reads any, within the block.

    Raises:
        ModelLoadError: The model's processor can't be used.
    """
    media = model.media
    if media is None:
        yield no_media
        return
    async with open_media_reader(config, processor_folder=path) as reader:

        def embed_with(encoder: MediaEncoder) -> EmbedMedia:
            return MediaEmbedder(
                reader=reader,
                encoder=encoder,
                metrics=metrics,
                placeholder=media.image_token_id,
                width=media.width,
            ).embed

        yield embed_with


def no_media(_: MediaEncoder) -> None:
    """Serve no media: an :data:`OpenMedia`."""


def worker_encoder(
    config: EngineConfig, schedulers: Schedulers, metrics: Metrics
) -> WorkerMediaEncoder:
    """Return the encoder of the process that has the workers."""
    return WorkerMediaEncoder(
        call=schedulers.call,
        wait_attached=schedulers.wait_attached,
        count_workers=lambda: sum(each.attached for each in schedulers),
        max_bytes=int(config.mm_processor_cache_gb * 2**30),
        metrics=metrics,
    )
