"""The JSON objects among the options of media."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.config import EngineConfig
from trioserve.config.media import FrameSampling, MediaOptions
from trioserve.protocol.errors import InvalidRequest


def test_the_counts_that_are_not_given_keep_their_defaults() -> None:
    assert MediaOptions().most_media() == {"image": 8, "audio": 8, "video": 1}
    given = EngineConfig("m", limit_mm_per_prompt='{"image": 2, "video": 0}')
    assert given.most_media() == {"image": 2, "audio": 8, "video": 0}
    assert MediaOptions().processor_arguments() == {}
    arguments = EngineConfig("m", mm_processor_kwargs='{"size": {"height": 3}}')
    assert arguments.processor_arguments() == {"size": {"height": 3}}
    assert MediaOptions().frame_sampling() == FrameSampling(fps=2, num_frames=32)
    for given, wanted in (
        ("{}", FrameSampling()),
        ('{"video": {"fps": 0.5}}', FrameSampling(fps=0.5)),
        ('{"video": {"num_frames": 8}}', FrameSampling(num_frames=8)),
    ):
        assert EngineConfig("m", media_io_kwargs=given).frame_sampling() == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": "3"}, "limit_mm_per_prompt must be a JSON object, as in"),
        ({"limit_mm_per_prompt": '{"images": 3}'}, "limit_mm_per_prompt has images; it takes"),
        ({"limit_mm_per_prompt": '{"image": -1}'}, "image must be an integer of at least 0"),
        ({"limit_mm_per_prompt": '{"image": true}'}, "image must be an integer of at least 0"),
        ({"mm_processor_kwargs": "[]"}, "mm_processor_kwargs must be a JSON object, as in"),
        ({"media_io_kwargs": "7"}, "media_io_kwargs must be a JSON object, as in"),
        ({"media_io_kwargs": '{"image": {}}'}, "media_io_kwargs has image; it takes video"),
        ({"media_io_kwargs": '{"video": 2}'}, "video must be an object with fps and num_frames"),
        ({"media_io_kwargs": '{"video": {"x": 1}}'}, "must be an object with fps and num_frames"),
        ({"media_io_kwargs": '{"video": {"fps": 0}}'}, "fps must be a number above 0"),
        ({"media_io_kwargs": '{"video": {"fps": NaN}}'}, "fps must be a number above 0"),
        ({"media_io_kwargs": '{"video": {"fps": true}}'}, "fps must be a number above 0"),
        ({"media_io_kwargs": '{"video": {"num_frames": 0}}'}, "num_frames must be a whole number"),
        ({"media_io_kwargs": '{"video": {"num_frames": 2.5}}'}, "num_frames must be a whole"),
        ({"allowed_media_domains": ("https://a",)}, "allowed_media_domains must be a host's name"),
        ({"limit_mm_pixels": 0}, "limit_mm_pixels must be a whole number from 1"),
        ({"limit_mm_seconds": 0}, "limit_mm_seconds must be a number above 0"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        EngineConfig("m", **options)
    assert raised.value.param == next(iter(options))
