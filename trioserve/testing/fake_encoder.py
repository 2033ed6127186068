"""An encoder without a model: each vector is a function of the token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve.model_files import EncoderConfig
from trioserve.model_files.encoder_files import ModelTask
from trioserve.pooling.columns import Columns
from trioserve.protocol import wire
from trioserve.testing.fake_worker import FakeWorker

Ints = npt.NDArray[np.int32]
OnBatch = Callable[[list[list[int]]], None]


def fake_vector(ids: Ints, type_ids: Ints, size: int) -> npt.NDArray[np.float32]:
    """Return the vector [size] of a text with these ids and type ids."""
    seed = [*np.asarray(ids).tolist(), -1 % 2**32, *np.asarray(type_ids).tolist()]
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def fake_encoder_config(
    task: ModelTask = "embed", *, labels: tuple[str, ...] = ("no", "yes"), max_length: int = 512
) -> EncoderConfig:
    """Return an encoder with 16 dimensions, or with ``labels``, for a vocabulary of 256."""
    is_classifier = task == "classify"
    return EncoderConfig(
        family="bert",
        task="classify" if is_classifier else "embed",
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        max_position_embeddings=max_length,
        padding_idx=None,
        type_vocab_size=2,
        marks_pairs=True,
        layer_norm_eps=1e-12,
        activation="gelu",
        max_length=max_length,
        pooling=None if is_classifier else "mean",
        labels=labels if is_classifier else (),
        score_activation="sigmoid" if is_classifier else "identity",
    )


def fake_encoder(
    config: EncoderConfig,
    *,
    on_batch: OnBatch = lambda _: None,
    call_time: float | Callable[[wire.Call], float] = 0.0,
    **options: Any,
) -> FakeWorker:
    """Return a worker that answers ``encode`` calls one after the other.

    Args:
        config: The encoder's configuration.
        on_batch: Called with the ids of each call's texts. May raise
            :class:`~trioserve.testing.WorkerDies`, or another error to fail the call.
        call_time: Duration of a call in seconds, or a function of the call.
        options: Other arguments of :class:`~trioserve.testing.FakeWorker`.
    """

    def encode(message: Any) -> bytes:
        columns = Columns.from_message(message)
        texts = [columns.text(index) for index in range(len(columns))]
        on_batch([ids.tolist() for ids, _ in texts])
        vectors = [fake_vector(*text, config.num_outputs) for text in texts]
        return wire.from_floats(np.stack(vectors))

    return FakeWorker(
        vocab_size=config.vocab_size,
        max_model_len=config.max_length,
        num_pages=0,
        calls={"encode": encode},
        calls_in_turn=True,
        call_time=call_time,
        **options,
    )
