"""The embeddings of audio for Qwen2-Audio, whose class in transformers has no method for them."""

from __future__ import annotations

from typing import Any

import torch


def qwen2_audio_features(
    model: Any, input_features: torch.Tensor, feature_attention_mask: torch.Tensor
) -> torch.Tensor:
    """Return the embeddings [n, E] of a clip, as ``Qwen2AudioModel.forward`` computes them.

    Args:
        model: A ``Qwen2AudioModel``.
        input_features: Mel spectrogram [1, mels, frames], with frames of silence at its end.
        feature_attention_mask: [1, frames], 0 for that silence.
    """
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.audio_tower
    # A convolution halves the frames, and averages of pairs halve its states.
    num_states = (feature_attention_mask.sum(-1) - 1) // 2 + 1
    num_embeddings = (int(num_states) - 2) // 2 + 1
    most_states = input_features.shape[-1] // 2
    is_heard = torch.arange(most_states, device=input_features.device) < num_states[:, None]
    mask: Any = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_empty((1, most_states, 1)),
        attention_mask=is_heard.long(),
    )
    states = tower(input_features, attention_mask=mask).last_hidden_state
    embeddings: torch.Tensor = model.multi_modal_projector(states)[0, :num_embeddings]
    return embeddings
