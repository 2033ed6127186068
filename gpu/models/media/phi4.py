"""The embeddings of images and audio for Phi-4, whose class in transformers has no such methods.

Its towers put their embeddings at the placeholder tokens of a prompt, which has nothing else here.
"""

from __future__ import annotations

from typing import Any

import torch


def let_patches_see_each_other(model: Any) -> None:
    """Make the attention of the tower for images that of all patches.

    transformers 5.23 declares it causal, and leaves out the mask that would correct that for an
    image without padding. The tower computes such an image as it does beside one with padding.
    """
    for layer in model.embed_tokens_extend.image_embed.img_processor.encoder.layers:
        layer.self_attn.is_causal = False


def phi4_features(
    model: Any,
    image_pixel_values: torch.Tensor | None = None,
    image_sizes: torch.Tensor | None = None,
    image_attention_mask: torch.Tensor | None = None,
    audio_input_features: torch.Tensor | None = None,
    audio_embed_sizes: torch.Tensor | None = None,
    is_beside_images: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the embeddings [1, n, E] of an image or a clip.

    Args:
        model: A ``Phi4MultimodalModel``.
        image_pixel_values: Crops [1, crops, 3, side, side] of an image, the whole first.
        image_sizes: Height and width [1, 2] of all crops but the first together.
        image_attention_mask: [1, crops, patches, patches], 0 for what isn't part of the image.
        audio_input_features: Mel spectrogram [1, frames, mels] of a clip.
        audio_embed_sizes: Number [1] of its embeddings.
        is_beside_images: Given if the clip's prompt has images, for which the projection differs.
    """
    towers, config = model.embed_tokens_extend, model.config
    if image_pixel_values is None:
        assert audio_input_features is not None
        assert audio_embed_sizes is not None
        ids = torch.full((1, int(audio_embed_sizes)), config.audio_config.audio_token_id)
        embeddings: torch.Tensor = towers.audio_embed(
            *_prompt_of(ids, config.hidden_size, audio_input_features),
            audio_input_features,
            audio_embed_sizes=audio_embed_sizes,
            audio_projection_mode="speech" if is_beside_images is None else "vision",
        )
        return embeddings
    assert image_sizes is not None
    assert image_attention_mask is not None
    # Its sums aren't exact in 16 bits.
    mask = (image_attention_mask > 0.5).long()
    count = _count_embeddings(image_sizes // config.vision_config.crop_size, mask)
    ids = torch.full((1, count), config.vision_config.image_token_id)
    embeddings = towers.image_embed(
        *_prompt_of(ids, config.hidden_size, image_pixel_values),
        image_pixel_values,
        image_sizes=image_sizes,
        image_attention_mask=mask,
    )
    return embeddings


def _prompt_of(
    ids: torch.Tensor, width: int, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``ids`` [1, n] and embeddings to be replaced, as ``values`` are stored."""
    return ids.to(values.device), values.new_zeros((*ids.shape, width))


def _count_embeddings(grid: torch.Tensor, mask: torch.Tensor) -> int:
    """Return the number of an image's embeddings: one for 2 x 2 patches, and one for each line.

    Args:
        grid: Numbers of rows and columns [1, 2] of crops.
        mask: [1, crops, patches, patches].
    """
    rows, columns = grid[0].tolist()
    halved = mask[0, :, ::2, ::2]
    side = halved.shape[-1]
    crops = halved[1:].reshape(rows, columns, side, side)
    height, width = int(crops[:, 0, :, 0].sum()), int(crops[0, :, 0].sum())
    return height * (width + 1) + 1 + side * (side + 1)
