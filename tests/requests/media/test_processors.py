"""A processor gives what transformers gives when it is called directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support import phi4_images
from tests.support.media_files import encoded, noise, tone
from tests.support.qwen_inputs import video_inputs
from tests.support.tiny_processors import (
    BEGINNING,
    gemma3,
    idefics3,
    llava,
    phi4,
    qwen2_vl,
    smolvlm,
    tokenizer,
    whisper,
)
from trioserve.config.media import MediaOptions
from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.requests.media.parts import AudioPart, ImagePart
from trioserve.requests.media.processors import MediaProcessor, ProcessedPart
from trioserve.requests.media.reader import open_media_reader
from trioserve.requests.media.refusals import Refused
from trioserve.requests.media.videos import Video

SIZES = ((40, 30), (30, 90), (7, 5))


def check_same(part: ProcessedPart | Any, wanted: Any, first_token: int) -> None:
    """Compare with transformers' own result, whose tokens follow the text's first one."""
    tokens = wanted.pop("input_ids")[0].tolist()
    assert tokens[0] == first_token
    assert part.token_ids == tokens[1:]
    del wanted["attention_mask"]
    assert part.arrays.keys() == wanted.keys()
    for name, array in part.arrays.items():
        assert array.dtype == wanted[name].dtype
        assert np.array_equal(array, wanted[name])


@pytest.mark.parametrize("make", [idefics3, llava])
def test_an_image_is_what_transformers_makes_of_it(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    direct = make(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    first = direct.tokenizer.convert_tokens_to_ids(BEGINNING)
    place = direct.tokenizer.convert_tokens_to_ids("<image>")
    for size in SIZES:
        image = noise(*size)
        part = processor.of_image(image)
        check_same(part, dict(direct(text="<image>", images=[image], return_tensors="np")), first)
        assert part.num_placeholder_tokens == part.token_ids.count(place) > 0
    with pytest.raises(Refused, match="the model reads no audio"):
        processor.of_audio(np.zeros(10, np.float32))
    with pytest.raises(Refused, match="the model reads no videos"):
        processor.of_video(Video(0.0, iter([(0.0, noise())])))


def test_line_breaks_around_an_image_are_part_of_its_text(tmp_path: Path) -> None:
    direct = gemma3(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    image = noise(90, 30)
    part = processor.of_image(image)
    wanted = dict(direct(text="<start_of_image>", images=[image], return_tensors="np"))
    del wanted["token_type_ids"]
    check_same(part, wanted, direct.tokenizer.convert_tokens_to_ids(BEGINNING))
    assert part.text == direct.full_image_sequence
    assert part.num_placeholder_tokens == 16
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    part = MediaProcessor(str(tmp_path), crops).of_image(image)
    assert part.text.count(direct.full_image_sequence) == 4
    assert part.arrays["pixel_values"].shape == (4, 3, 32, 32)
    assert part.num_placeholder_tokens == 4 * 16


def test_images_of_phi_4_are_what_transformers_makes_of_them_by_torchvision(tmp_path: Path) -> None:
    """Pixels of a resized image may be rounded otherwise."""
    direct = phi4(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    known = json.loads(phi4_images.FILE.read_text())
    for (image, arguments), wanted in zip(phi4_images.pictures(), known, strict=True):
        if arguments:
            processor = MediaProcessor(str(tmp_path), arguments)
        part = processor.of_image(image)
        assert part.token_ids == [direct.image_token_id] * wanted["num_tokens"]
        assert part.num_placeholder_tokens == wanted["num_tokens"]
        facts = phi4_images.facts_of(part.arrays)
        pixels, others = (np.array(each.pop("pixels")) for each in (facts, wanted))
        assert pixels == pytest.approx(others, abs=2.5 / 255)
        assert (np.abs(pixels - others) < 1e-3).mean() > 0.95
        assert facts.pop("means") == pytest.approx(wanted.pop("means"), abs=1e-3)
        del wanted["num_tokens"]
        assert facts == wanted


def test_smaller_images_of_phi_4_are_padded_beside_larger_ones(tmp_path: Path) -> None:
    direct = phi4(tmp_path).image_processor
    images = [noise(500, 300), noise(40, 30)]
    both = direct(images, return_tensors="np")
    for number, image in enumerate(images):
        alone = direct([image], return_tensors="np")
        count = alone["image_pixel_values"].shape[1]
        assert both["image_pixel_values"].shape[1] == 3 >= count
        for name, filled in (("image_pixel_values", 0), ("image_attention_mask", 1)):
            assert np.array_equal(both[name][number, :count], alone[name][0])
            assert (both[name][number, count:] == filled).all()
        for name in ("image_sizes", "num_img_tokens"):
            assert np.array_equal(both[name][number], alone[name][0])


def test_images_that_phi_4_cannot_take_are_refused(tmp_path: Path) -> None:
    phi4(tmp_path)
    with pytest.raises(Refused, match="aspect ratio of 2 x 300 pixels is too extreme"):
        MediaProcessor(str(tmp_path), {}).of_image(noise(2, 300))
    with pytest.raises(ModelLoadError, match="the size has to be a square"):
        MediaProcessor(str(tmp_path), {"size": {"height": 448, "width": 224}})


def test_audio_of_phi_4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    direct = phi4(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    samples = tone(rate=16_000).astype(np.float32)
    part = processor.of_audio(samples)
    wanted = direct.audio_processor(samples, sampling_rate=16_000, return_tensors="np")
    assert part.arrays.keys() == wanted.keys() == {"audio_input_features", "audio_embed_sizes"}
    for name, array in part.arrays.items():
        assert np.array_equal(array, wanted[name])
    assert part.token_ids == [direct.audio_token_id] * 6
    assert part.num_placeholder_tokens == 6
    with pytest.raises(Refused, match="the model's processor refuses the audio"):
        processor.of_audio(samples[:100])


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}},
        {"min_pixels": 28 * 28, "max_pixels": 8 * 28 * 28},
    ],
)
@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
def test_a_processor_of_images_and_videos_reads_images_without_torchvision(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    assert find_spec("torchvision") is None
    direct = qwen2_vl(tmp_path)
    processor = MediaProcessor(str(tmp_path), arguments)
    image = noise(130, 90)
    part = processor.of_image(image)
    wanted = direct([image], return_tensors="np", **arguments)
    assert part.arrays.keys() == wanted.keys() == {"pixel_values", "image_grid_thw"}
    for name, array in part.arrays.items():
        assert np.array_equal(array, wanted[name])
    count = wanted["image_grid_thw"].prod() // 4
    assert len(part.token_ids) == part.num_placeholder_tokens == count <= 8
    assert len(set(part.token_ids)) == 1


def test_a_video_is_its_frames_unsplit_with_their_times(tmp_path: Path) -> None:
    direct = smolvlm(tmp_path)
    images = [noise(40, 30, seed=number) for number in range(3)]
    video = Video(75.9, iter(zip((0.0, 1.96, 75.5), images, strict=True)))
    part = MediaProcessor(str(tmp_path), {}).of_video(video)
    frames = [
        direct.image_processor([image], return_tensors="np", do_image_splitting=False)
        for image in images
    ]
    for name in ("pixel_values", "pixel_attention_mask"):
        wanted = np.concatenate([frame[name] for frame in frames], axis=1)
        assert np.array_equal(part.arrays[name], wanted)
    assert part.arrays["pixel_values"].shape == (1, 3, 3, 32, 32)
    fake, image = "<fake_token_around_image>", "<image>" * 4
    shown = [f"\nFrame from {time}:{fake}<global-img>{image}{fake}" for time in ("00:00", "00:01")]
    assert part.text == (
        "You are provided the following series of three frames from a 0:01:15 [H:MM:SS] video.\n"
        f"{''.join(shown)}\nFrame from 01:15:{fake}<global-img>{image}{fake}\n\n"
    )
    assert part.token_ids == direct.tokenizer(part.text, add_special_tokens=False)["input_ids"]
    assert part.num_placeholder_tokens == 12


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("settings", [{}, {"min_pixels": 12 * 28 * 28}])
def test_a_video_of_qwen_s_models_is_what_transformers_makes_of_it(
    settings: dict[str, int], tmp_path: Path
) -> None:
    images = qwen2_vl(tmp_path)
    if settings:
        written = {**settings, "video_processor_type": "Qwen2VLVideoProcessor"}
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(written))
        images = type(images)(**settings)
    frames = [noise(60, 90, seed=number) for number in range(5)]
    video = Video(2.5, iter(zip((0.0, 0.5, 1.0, 1.5, 2.0), frames, strict=True)))
    part = MediaProcessor(str(tmp_path), {}).of_video(video)
    wanted = video_inputs(images, frames, 2.5)
    for name, other in (
        ("pixel_values", "pixel_values_videos"),
        ("image_grid_thw", "video_grid_thw"),
    ):
        assert part.arrays[name] == pytest.approx(wanted[other].numpy(), abs=1e-6)
    assert part.arrays["second_per_grid_ts"] == wanted["second_per_grid_ts"].numpy() == 1
    num_tokens = wanted["video_grid_thw"].prod() // 4
    assert (
        len(part.token_ids) == part.num_placeholder_tokens == num_tokens == (45 if settings else 18)
    )
    assert len(set(part.token_ids)) == 1
    two = Video(2.5, iter([(0.0, frames[0])]))
    bounds = {"min_pixels": 28 * 28, "max_pixels": 28 * 28}
    assert len(MediaProcessor(str(tmp_path), bounds).of_video(two).token_ids) == 1


def test_videos_have_settings_of_their_own(tmp_path: Path) -> None:
    smolvlm(tmp_path)
    kind = {"video_processor_type": "SmolVLMVideoProcessor"}
    own = {"max_image_size": {"longest_edge": 48}, "fps": 1, **kind}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    for arguments, side in (({}, 48), ({"max_image_size": {"longest_edge": 16}}, 16)):
        video = Video(0.0, iter([(0.0, noise(40, 30))]))
        part = MediaProcessor(str(tmp_path), arguments).of_video(video)
        assert part.arrays["pixel_values"].shape == (1, 1, 3, side, side)


def test_a_damaged_video_is_refused_with_its_reason(tmp_path: Path) -> None:
    smolvlm(tmp_path)

    def frames() -> Iterator[Any]:
        yield 0.0, noise()
        raise Refused("the video ends")

    processor = MediaProcessor(str(tmp_path), {})
    with pytest.raises(Refused, match=r"^the video ends$"):
        processor.of_video(Video(1.0, frames()))


def test_audio_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    direct = whisper(tmp_path)
    processor = MediaProcessor(str(tmp_path), {})
    assert processor.sample_rate == 16_000
    samples = tone(rate=16_000).astype(np.float32)
    part = processor.of_audio(samples)
    wanted = direct(samples, sampling_rate=16_000, return_tensors="np")
    assert part.arrays.keys() == wanted.keys()
    assert np.array_equal(part.arrays["input_features"], wanted["input_features"])
    assert (part.token_ids, part.num_placeholder_tokens) == ([], 0)
    with pytest.raises(Refused, match="the model reads no images"):
        processor.of_image(noise())


def test_arguments_are_passed_on_and_checked(tmp_path: Path) -> None:
    direct = idefics3(tmp_path)
    image = noise(40, 30)
    arguments = {"do_image_splitting": False}
    part = MediaProcessor(str(tmp_path), arguments).of_image(image)
    first = direct.tokenizer.convert_tokens_to_ids(BEGINNING)
    wanted = direct(text="<image>", images=[image], return_tensors="np", **arguments)
    check_same(part, dict(wanted), first)
    for given, reason in (
        ({"nonsense": 1, "return_tensors": "pt"}, "mm_processor_kwargs has nonsense, return_ten"),
        ({"do_image_splitting": 3}, "fails with mm_processor_kwargs .*expected bool, got int"),
    ):
        with pytest.raises(ModelLoadError, match=reason):
            MediaProcessor(str(tmp_path), given)


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="reads no media: it has none of processor_config"):
        MediaProcessor(str(tmp_path), {})
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is none of images or audio"):
        MediaProcessor(str(tmp_path), {})
    (tmp_path / "processor_config.json").write_text("[")
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        MediaProcessor(str(tmp_path), {})


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("open('ran', 'w'); raise SystemExit")
    names = {"AutoProcessor": "own.Own", "AutoImageProcessor": "own.Own"}
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"processor_class": "Own", "auto_map": names})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"auto_map": names}))
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        MediaProcessor(str(tmp_path), {})
    assert not Path("ran").exists()


async def test_a_child_process_runs_the_processor(tmp_path: Path) -> None:
    direct = idefics3(tmp_path)
    first = direct.tokenizer.convert_tokens_to_ids(BEGINNING)
    image = noise(40, 30)
    wanted = direct(text="<image>", images=[image], return_tensors="np")
    before = set(psutil.Process().children())
    async with open_media_reader(MediaOptions(), processor_folder=tmp_path) as reader:
        (first_process,) = set(psutil.Process().children()) - before
        # Threads don't come along when a process forks.
        assert first_process.num_threads() == 1
        for source in (image, encoded(image, "PNG")):
            processed = await reader.read(ImagePart(source), name="images[0]")
            check_same(processed, dict(wanted), first)
            assert processed.num_placeholder_tokens == 20
        with pytest.raises(InvalidRequest, match=r"^audio\[0\]: the audio has an unknown format"):
            await reader.read(AudioPart(b"x"), name="audio[0]")


async def test_a_processor_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="reads no media: it has none of"):
        async with open_media_reader(MediaOptions(), processor_folder=tmp_path):
            pass
