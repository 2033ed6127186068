"""The chat template of a model that reads videos prints them."""

from __future__ import annotations

from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from trioserve.model_files.media_config import MediaConfig, template_with_videos


def test_a_template_without_videos_is_replaced_as_transformers_does() -> None:
    image = MediaConfig(architecture="A", width=8, token_ids={"image": 1})
    video = MediaConfig(
        architecture="A", width=8, token_ids={"image": 1, "video": 1}, texts={"video": "<video>"}
    )
    for own in ("{{ '<image>' }}", None):
        assert template_with_videos(video, own) == DEFAULT_CHAT_TEMPLATE
        assert template_with_videos(image, own) == own
        assert template_with_videos(None, own) == own
    assert template_with_videos(video, "{{ '<video>' }}") == "{{ '<video>' }}"
