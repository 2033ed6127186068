"""Sentences that a Whisper model hears: ``python -m tests.exactness.speech --model FOLDER``.

espeak-ng speaks them. Their transcripts have to be those of transformers' greedy decoding, token by
token in float32, and the times of the tokens those of its attention; else the exit code is 1.
Durations are of one transcript after another, of all at once, and of all times after that.
``--ctranslate2`` is a model of English alone in that format, in place of ``--model``.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import soundfile
import soxr
import trio

from bench.report import Made, markdown, script
from tests.exactness.ctranslate2 import rewrite
from tests.support.speech_reference import Reference
from trioserve import Engine, open_engine
from trioserve.requests.media.parts import AudioPart
from trioserve.requests.speech.reader import RATE
from trioserve.requests.speech.tasks import SpeechOptions, tokens_before

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please call me tomorrow at nine thirty in the morning.",
    "Three hundred and sixty five days make a year.",
    "The weather in London is cold and rainy today.",
    "She sells sea shells by the sea shore.",
    "A server should answer every request, or say why it doesn't.",
    "My name is Alice, and I live in New York.",
    "The train to Paris leaves from platform seven.",
    "Could you open the window, please?",
    "Water boils at one hundred degrees.",
    "The library is closed on Sundays.",
    "He bought two pounds of apples and a loaf of bread.",
    "The meeting has been moved to Thursday afternoon.",
    "Turn left at the next corner, then go straight ahead.",
    "I have never seen such a beautiful garden.",
    "The book on the table belongs to my sister.",
    "They walked along the river until the sun went down.",
    "Music was playing in the room next door.",
    "We need a larger box for all of these papers.",
    "Good night, and thank you for listening.",
)


def spoken(text: str) -> bytes:
    """Return the WAV file in which espeak-ng says ``text``."""
    done = subprocess.run(
        ["espeak-ng", "-s", "150", "--stdout", text], check=True, capture_output=True
    )
    return done.stdout


def wanted(folder: Path, clips: list[bytes]) -> list[list[int]]:
    """Return the tokens of transformers' greedy decoding of each clip."""
    import transformers

    extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(folder).float()
    end = model.generation_config.eos_token_id
    found = []
    for clip in clips:
        samples, rate = soundfile.read(io.BytesIO(clip), dtype="float32")
        samples = soxr.resample(samples, rate, RATE)
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        tokens = model.generate(features, do_sample=False)[0].tolist()
        found.append([token for token in tokens if token < end])
    return found


async def transcribe(engine: Engine, clips: list[bytes]) -> tuple[list[list[int]], float, float]:
    """Return the tokens of all clips, and the seconds that they take one by one, and at once."""
    end = engine.eos_token_ids[0]
    found: dict[int, list[int]] = {}

    async def ask(index: int) -> None:
        heard = await engine.transcribe(clips[index], temperature=0)
        tokens = [token for each in heard.segments for token in each.token_ids]
        found[index] = [token for token in tokens if token < end]

    began = time.perf_counter()
    for index in range(len(clips)):
        await ask(index)
    alone = time.perf_counter() - began
    first = [found[index] for index in range(len(clips))]
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for index in range(len(clips)):
            nursery.start_soon(ask, index)
    together = time.perf_counter() - began
    assert first == [found[index] for index in range(len(clips))]
    return first, alone, together


async def align(
    engine: Engine, path: Path, clips: list[bytes], tokens: list[list[int]]
) -> tuple[list[bool], float]:
    """Return which clips have all times of transformers, and the seconds that all times take."""
    assert engine.transcriber is not None
    reader = engine.transcriber.reader
    before = tokens_before(reader.config, SpeechOptions(), "en", [])
    samples = [await reader.read(AudioPart(clip), "audio") for clip in clips]
    began = time.perf_counter()
    found = [
        await reader.token_times(samples[index], 0.0, before, text, "audio")
        for index, text in enumerate(tokens)
    ]
    seconds = time.perf_counter() - began
    reference = await trio.to_thread.run_sync(Reference, path)
    expected = [
        reference.token_times(samples[index], before, text) for index, text in enumerate(tokens)
    ]
    return [own == other for own, other in zip(found, expected, strict=True)], seconds


@script
async def measure(*, model: str = "", ctranslate2: str = "", num_threads: int = 2) -> Made:
    """Transcribe all sentences with both; see the module's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = rewrite(Path(ctranslate2), Path(folder)) if ctranslate2 else Path(model)
        clips = [spoken(sentence) for sentence in SENTENCES]
        seconds = sum(soundfile.info(io.BytesIO(clip)).duration for clip in clips)
        expected = await trio.to_thread.run_sync(wanted, path, clips)
        async with open_engine(
            str(path),
            dtype="float32",
            device="cpu",
            num_threads=num_threads,
            mm_processor_cache_gb=0,
        ) as engine:
            found, alone, together = await transcribe(engine, clips)
            texts = [engine.tokenizer.decode(tokens) for tokens in found]
            timed, aligning = await align(engine, path, clips, found)
    equal = [own == other for own, other in zip(found, expected, strict=True)]
    rows = [
        (sentence, text.strip(), *("equal" if same else "differs" for same in both))
        for sentence, text, *both in zip(SENTENCES, texts, equal, timed, strict=True)
    ]
    table = markdown(("said", "heard", "tokens of transformers", "times"), rows)
    times = markdown(
        ("transcripts", "seconds of audio", "one by one", "at once", "times of tokens"),
        [(len(clips), *(f"{each:.1f}" for each in (seconds, alone, together, aligning)))],
    )
    return Made(f"{table}\n\n{times}", {}, 0 if all([*equal, *timed]) else 1)
