"""A request's arguments do what they do in transformers, and nothing to other requests."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.media_files import encoded, noise
from tests.support.tiny_processors import (
    BEGINNING,
    gemma3,
    idefics3,
    llava,
    llava_onevision,
    phi4,
    qwen2_vl,
    smolvlm,
    whisper,
)
from tests.support.video_files import video
from trioserve.config.media import MediaOptions
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media.parts import ImagePart, VideoPart
from trioserve.requests.media.processor_arguments import ArrayForms, PartArguments
from trioserve.requests.media.processors import MediaProcessor, ProcessedPart
from trioserve.requests.media.reader import MAX_ARRAY_BYTES, MediaReader, open_media_reader
from trioserve.requests.media.refusals import ArgumentsRefused, Refused
from trioserve.requests.media.videos import Video
from trioserve.requests.media_arguments import MediaArguments

WHOLE = {"do_image_splitting": False}
MEAN = [0.25, 0.5, 0.75]
CHANGES: list[tuple[Callable[[Path], Any], dict[str, Any]]] = [
    (idefics3, WHOLE),
    (smolvlm, {"size": {"longest_edge": 32}}),
    (llava, {"image_mean": MEAN, "resample": 0}),
    (llava_onevision, {"image_mean": MEAN}),
    (gemma3, {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}),
    (qwen2_vl, {"max_pixels": 2 * 28 * 28, "min_pixels": 28 * 28}),
]


def own(max_array_bytes: int = MAX_ARRAY_BYTES, **given: Any) -> PartArguments:
    return PartArguments(given=given, max_array_bytes=max_array_bytes)


def assert_equal(part: ProcessedPart, other: ProcessedPart) -> None:
    assert part.token_ids == other.token_ids
    assert part.arrays.keys() == other.arrays.keys()
    for name, array in part.arrays.items():
        assert np.array_equal(array, other.arrays[name])


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize(("make", "given"), CHANGES)
def test_they_are_those_of_the_option_for_one_image(
    make: Callable[[Path], Any], given: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path)
    processor, image = MediaProcessor(str(tmp_path), {}), noise(90, 40)
    before = processor.of_image(image)
    changed = processor.of_image(image, own(**given))
    assert_equal(changed, MediaProcessor(str(tmp_path), given).of_image(image))
    assert any(
        array.shape != before.arrays[name].shape or not np.array_equal(array, before.arrays[name])
        for name, array in changed.arrays.items()
    )
    assert_equal(processor.of_image(image), before)


def test_an_image_that_is_not_split_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    direct, image = idefics3(tmp_path), noise(40, 30)
    processor = MediaProcessor(str(tmp_path), {})
    part = processor.of_image(image, own(**WHOLE))
    wanted = direct(text="<image>", images=[image], return_tensors="np", **WHOLE)
    beginning = direct.tokenizer.convert_tokens_to_ids(BEGINNING)
    assert [beginning, *part.token_ids] == wanted["input_ids"][0].tolist()
    assert np.array_equal(part.arrays["pixel_values"], wanted["pixel_values"])
    assert part.num_placeholder_tokens == 4
    assert processor.of_image(image).num_placeholder_tokens == 20


def test_arguments_of_a_request_are_laid_over_those_of_the_option(tmp_path: Path) -> None:
    idefics3(tmp_path)
    processor = MediaProcessor(str(tmp_path), {**WHOLE, "image_mean": MEAN})
    image, split = noise(40, 30), {"do_image_splitting": True}
    part = processor.of_image(image, own(**split))
    assert part.num_placeholder_tokens == 20
    both = {**split, "image_mean": MEAN}
    assert_equal(part, MediaProcessor(str(tmp_path), both).of_image(image))


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
def test_they_count_for_the_frames_of_a_video(tmp_path: Path) -> None:
    qwen2_vl(tmp_path)
    given = {"min_pixels": 28 * 28, "max_pixels": 28 * 28}
    processor = MediaProcessor(str(tmp_path), {})
    frames = [Video(1.0, iter([(0.0, noise(90, 60))])) for _ in range(2)]
    assert processor.of_video(frames[0]).num_placeholder_tokens == 6
    assert processor.of_video(frames[1], own(**given)).num_placeholder_tokens == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nonsense": 1, "url": "http://a/"}, "has nonsense, url; the model's processor takes"),
        ({"return_tensors": "pt"}, "has return_tensors; "),
        ({"device": "cuda"}, "has device; "),
        ({"max_length": 3}, "has max_length; "),  # of audio
        ({"do_image_splitting": "no"}, "has a wrong value: .*'do_image_splitting' expected"),
        ({"size": {"longest_edge": "/etc/passwd"}}, "has a wrong value: .*'size'"),
        ({"do_resize": {"path": "/"}}, "has a wrong value: .*'do_resize'"),
    ],
)
def test_names_and_types_are_checked_before_anything_is_decoded(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    idefics3(tmp_path)
    with pytest.raises(ArgumentsRefused, match=f"^mm_processor_kwargs {told}"):
        MediaProcessor(str(tmp_path), {}).check(own(**given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"resample": 99}, r"refuses the image with mm_processor_kwargs \(resample\): "),
        ({"max_image_size": {"longest_edge": 16}}, r"takes .* \[…, …, …, 32, 32\], and .* 16, 16"),
        ({"do_rescale": False, "do_normalize": False}, "the processor gives uint8 "),
        ({"image_std": [0.0, 0.0, 0.0]}, "no finite numbers with .*image_std"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_a_tower_is_not_made_for_is_refused(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    idefics3(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    processor.check(own(**given))
    with pytest.raises(ArgumentsRefused, match=told):
        processor.of_image(noise(40, 30), own(**given))


def test_other_arrays_than_those_of_the_model_are_refused() -> None:
    forms = ArrayForms.of({"x": np.ones((1, 2, 3, 4)), "mask": np.ones((1, 2), np.int64)})
    same = {"x": np.ones((5, 6, 3, 4)), "mask": np.ones((9, 2), np.int64)}
    forms.check(same, own())
    for other in (
        {"x": same["x"]},
        {**same, "rows": np.ones(3)},
        {**same, "x": np.ones((5, 3, 4))},
        {**same, "x": np.ones((1, 2, 4, 3))},
        {**same, "mask": np.ones((9, 3), np.int64)},
        {**same, "mask": np.ones((9, 2), np.int32)},
        {**same, "x": np.full((1, 2, 3, 4), np.inf)},
    ):
        with pytest.raises(ArgumentsRefused):
            forms.check(other, own(size=1))


def test_what_the_weights_say_is_no_argument_of_a_request(tmp_path: Path) -> None:
    qwen2_vl(tmp_path)
    given = {"merge_size": 2, "patch_size": 14, "temporal_patch_size": 2}
    processor = MediaProcessor(str(tmp_path), given)
    assert not given.keys() & processor.argument_names
    with pytest.raises(ArgumentsRefused, match="has merge_size, patch_size, temporal_patch_size; "):
        processor.check(own(**given))


def test_a_part_that_is_refused_anyway_is_not_the_fault_of_arguments(tmp_path: Path) -> None:
    phi4(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    with pytest.raises(Refused, match="aspect ratio of 2 x 180 pixels") as refused:
        processor.of_image(noise(2, 180), own(dynamic_hd=8))
    assert not isinstance(refused.value, ArgumentsRefused)
    with pytest.raises(ArgumentsRefused, match=r"with mm_processor_kwargs \(resample\): .* be 3"):
        processor.of_image(noise(40, 30), own(resample=2))


def test_arguments_do_not_tell_how_long_a_clip_is(tmp_path: Path) -> None:
    phi4(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    for seconds in (1, 3):
        samples = np.ones(seconds * processor.sample_rate, np.float32)
        part = processor.of_audio(samples, own(dynamic_hd=8))
        assert_equal(part, processor.of_audio(samples))


def test_the_grid_of_tiles_is_that_of_the_tower(tmp_path: Path) -> None:
    llava_onevision(tmp_path)
    given = {"image_grid_pinpoints": [[2304, 2304]], "crop_size": {"height": 8, "width": 8}}
    with pytest.raises(ArgumentsRefused, match="has crop_size, image_grid_pinpoints; "):
        MediaProcessor(str(tmp_path), {}).check(own(**given))


def test_arrays_are_bounded(tmp_path: Path) -> None:
    idefics3(tmp_path)
    processor, image = MediaProcessor(str(tmp_path), {}), noise(40, 30)
    large = {"size": {"longest_edge": 256}}
    size = sum(each.nbytes for each in processor.of_image(image, own(**large)).arrays.values())
    with pytest.raises(
        ArgumentsRefused, match=f"arrays of {size} bytes .* {size - 1} are left for"
    ):
        processor.of_image(image, own(size - 1, **large))


def test_a_clip_is_not_padded_to_another_length(tmp_path: Path) -> None:
    whisper(tmp_path)
    processor, samples = MediaProcessor(str(tmp_path), {}), np.ones(8000, np.float32)
    part = processor.of_audio(samples, own(do_normalize=True))
    assert not np.array_equal(part.arrays["input_features"], processor.of_audio(samples).arrays)
    with pytest.raises(ArgumentsRefused, match="the model takes input_features as float32"):
        processor.of_audio(samples, own(max_length=32_000))
    with pytest.raises(ArgumentsRefused, match="has do_image_splitting; "):
        processor.check(own(**WHOLE))


async def refused(reader: MediaReader, part: ImagePart, **given: Any) -> str:
    with pytest.raises(InvalidRequest) as raised:
        await reader.read(
            part,
            name="images[0]",
            arguments=MediaArguments(processor=given),
            max_array_bytes=MAX_ARRAY_BYTES,
        )
    assert raised.value.param == "mm_processor_kwargs"
    return str(raised.value)


async def test_large_arrays_and_bombs_cost_their_own_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smolvlm(tmp_path)
    image, text = ImagePart(noise(40, 30)), ImagePart(base64.b64encode(b"no image").decode())
    options = MediaOptions(limit_mm_pixels=1 << 20)
    async with open_media_reader(options, processor_folder=tmp_path) as reader:
        for edge in (10**6, 10**18):
            reason = await refused(reader, image, max_image_size={"longest_edge": edge})
            assert reason.startswith("images[0]: ")
            assert "mm_processor_kwargs (max_image_size)" in reason
        # The arguments are checked first.
        assert "a wrong value" in await refused(reader, text, do_resize="no")
        arguments = MediaArguments(processor={"do_image_splitting": True})
        with pytest.raises(InvalidRequest, match="has url; the model's processor takes"):
            reader.check_arguments(MediaArguments(processor={"url": "http://a/"}))
        reader.check_arguments(arguments)
        (found,) = await reader.read_all([("images[0]", image)], arguments)
        size = sum(each.nbytes for each in found.arrays.values())
        monkeypatch.setattr("trioserve.requests.media.reader.MAX_ARRAY_BYTES", 2 * size + 1)
        assert len(await reader.read_all([("images[0]", image)] * 2, arguments)) == 2
        three = [("images[0]", image)] * 3
        with pytest.raises(InvalidRequest, match="and 1 are left for this part") as raised:
            await reader.read_all(three, arguments)
        assert raised.value.param == "mm_processor_kwargs"
        for few in (MediaArguments(), MediaArguments(reading={"video": {"num_frames": 2}})):
            assert len(await reader.read_all(three, few)) == 3
        more = MediaArguments(reading={"video": {"num_frames": 33}})
        with pytest.raises(InvalidRequest, match="and 1 are left for this part") as raised:
            await reader.read_all(three, more)


async def test_a_digest_tells_the_arguments_of_requests_apart() -> None:
    image, film = ImagePart(encoded(noise(), "PNG")), VideoPart(video())
    given = [{}, WHOLE, {"do_image_splitting": True}, {"do_resize": False}]
    several = [MediaArguments(processor=each) for each in given]
    frames = [{"num_frames": 1}, {"fps": 1}]
    several += [MediaArguments(reading={"video": each}) for each in frames]

    async def digests(part: ImagePart | VideoPart, text: str | None = None) -> list[bytes]:
        async with open_media_reader(MediaOptions(mm_processor_kwargs=text)) as reader:
            found = [await reader.read_all([("part", part)], each) for each in several]
            return [each.digest for (each,) in found]

    plain = await digests(image)
    assert len(set(plain)) == 4
    assert plain[0] == plain[4] == plain[5]  # An image has no frames.
    with_option = await digests(image, '{"do_image_splitting": false}')
    assert with_option[:3] == [plain[1], plain[1], plain[2]]
    assert with_option[3] not in plain
    assert len(set(await digests(film))) == 6
