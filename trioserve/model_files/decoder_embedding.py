"""Decoders that were trained to embed texts: how their folders describe the embedding.

Qwen3-Embedding and similar models have files of sentence-transformers beside a decoder's. Others
were saved as a bare model, without the output matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from trioserve.model_files.sentence_modules import MODULES, read_sentence_modules
from trioserve.protocol.errors import ModelLoadError

DecoderPooling = Literal["last", "mean"]
"""Pooling of a text: the hidden state of its last token, or the mean of all tokens."""


@attrs.frozen(kw_only=True)
class DecoderEmbedding:
    """The pooling and scaling of a decoder's hidden states, unless a request overrides it."""

    pooling: DecoderPooling = "last"
    normalize: bool = True
    """True to scale the embedding to length 1."""


def read_decoder_embedding(folder: Path, hidden_size: int) -> DecoderEmbedding | None:
    """Return the embedding by sentence-transformers' files in ``folder``; None without them.

    Raises:
        ModelLoadError: A file is missing or damaged, or a step isn't supported.
    """
    steps = read_sentence_modules(folder, hidden_size)
    if steps is None:
        return None
    if steps.pooling is None:
        return DecoderEmbedding()
    if steps.dense or (steps.pooling != "last" and steps.pooling != "mean"):
        what = "Dense" if steps.dense else f"the pooling {steps.pooling}"
        raise ModelLoadError(
            f"{folder / MODULES}: {what} isn't served with this architecture; "
            "the poolings last and mean are, and Normalize"
        )
    return DecoderEmbedding(pooling=steps.pooling, normalize=steps.normalize)
