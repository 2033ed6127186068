"""The media of prompts: what an engine reads them with, and has their embeddings computed by."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from trioserve.config import EngineConfig
from trioserve.engine.loaded_model import LoadedModel
from trioserve.engine.schedulers import Schedulers
from trioserve.requests.media.embedding import MediaEmbedder
from trioserve.requests.media.reader import MediaReader, open_media_reader
from trioserve.text.tokenizer_task import EmbedMedia


@contextlib.asynccontextmanager
async def open_reader(
    config: EngineConfig, model: LoadedModel, path: Path
) -> AsyncIterator[MediaReader | None]:
    """Yield the reader of the media of a model in the folder ``path``; None if it reads none.

    Raises:
        ModelLoadError: The model's processor can't be used.
    """
    if model.media is None:
        yield None
        return
    async with open_media_reader(config, processor_folder=path) as reader:
        yield reader


def media_embedder(
    config: EngineConfig, model: LoadedModel, reader: MediaReader | None, schedulers: Schedulers
) -> EmbedMedia | None:
    """Return what gives the embeddings of media; None without a ``reader``."""
    if reader is None or model.media is None:
        return None
    return MediaEmbedder(
        reader=reader,
        call=schedulers.call,
        wait_attached=schedulers.wait_attached,
        placeholder=model.media.image_token_id,
        width=model.media.width,
        max_bytes=int(config.mm_processor_cache_gb * 2**30),
    ).embed
