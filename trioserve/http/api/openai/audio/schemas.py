"""The forms and answers of ``/v1/audio``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Seconds, about, only
from trioserve.http.api.schema.refused_fields import Refusal

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]


class SpeechForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both forms, with the names of OpenAI's API."""

    file: Annotated[bytes, about("The audio: a WAV, FLAC, Ogg or MP3 file.")]
    model: Annotated[str | None, about("The served name of the model.")] = None
    prompt: Annotated[
        Text | None,
        about("Text that might precede the audio, for its spelling and style. A long one is cut."),
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        about(
            "`json` (the default) or `text` for the text alone, `verbose_json` for segments with "
            "their times, `srt` or `vtt` for subtitles."
        ),
    ] = None
    temperature: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
        about(
            "0 for the most probable tokens; else they are drawn. By default it is 0, and higher "
            "for windows whose text isn't plausible then."
        ),
    ] = None
    condition_on_previous_text: Annotated[
        bool | None, about("True to have the text so far precede each window.")
    ] = None
    timeout: Annotated[
        Seconds | None, about("Seconds after which the request ends with an error.")
    ] = None


class TranslationForm(SpeechForm):
    """The form of a translation into English."""


class TranscriptionForm(SpeechForm):
    """The form of a transcript."""

    language: Annotated[
        str | None,
        about("Code of the language that is spoken, such as `en`. It is detected by default."),
    ] = None
    stream: Annotated[
        bool | None, about("True for events with the text as it comes, of `json` or `text`.")
    ] = None
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None,
        about(
            "`segment` (the default), `word` or both: the parts of the text whose times "
            "`verbose_json` has."
        ),
    ] = None
    chunking_strategy: Annotated[Any, only(refusal=Refusal.VOICE_DETECTION)] = None
    include: Annotated[list[str] | None, only(refusal=Refusal.TRANSCRIPT_LOGPROBS)] = None
    keywords: Annotated[list[str] | None, only(refusal=Refusal.KEYWORDS)] = None
    known_speaker_names: Annotated[list[str] | None, only(refusal=Refusal.SPEAKERS)] = None
    known_speaker_references: Annotated[list[str] | None, only(refusal=Refusal.SPEAKERS)] = None
    languages: Annotated[list[str] | None, only(refusal=Refusal.SEVERAL_LANGUAGES)] = None


class AudioUsage(msgspec.Struct, tag="duration", tag_field="type"):
    """The length of what was transcribed."""

    seconds: Annotated[int, about("Seconds of audio, rounded up.")]


class TranscriptSegment(msgspec.Struct):
    """A part of a transcript."""

    id: Annotated[int, about("Number of the segment.")]
    seek: Annotated[int, about("Beginning of the window it was heard in, in hundredths of s.")]
    start: Annotated[float, about("Its beginning, in seconds.")]
    end: Annotated[float, about("Its end, in seconds.")]
    text: Annotated[str, about("Its text.")]
    tokens: Annotated[list[int], about("Its tokens, timestamps included.")]
    temperature: Annotated[float, about("The temperature of the window's tokens.")]
    avg_logprob: Annotated[float, about("Mean log-probability of the window's tokens.")]
    compression_ratio: Annotated[
        float, about("Bytes of the text by those of it compressed; more for repetitions.")
    ]
    no_speech_prob: Annotated[float, about("Probability that the window has no speech.")]


class TranscriptWord(msgspec.Struct):
    """A word of a transcript."""

    word: Annotated[str, about("The word, with the punctuation beside it.")]
    start: Annotated[float, about("Its beginning, in seconds.")]
    end: Annotated[float, about("Its end, in seconds.")]


class TranscriptReply(msgspec.Struct):
    """A transcript or a translation."""

    text: Annotated[str, about("The text.")]
    usage: Annotated[AudioUsage, about("What was transcribed.")]
    task: Annotated[
        Literal["transcribe", "translate"] | UnsetType, about("`verbose_json`: the task.")
    ] = UNSET
    language: Annotated[
        str | UnsetType, about("`verbose_json`: the code of the language that is spoken.")
    ] = UNSET
    duration: Annotated[float | UnsetType, about("`verbose_json`: seconds of audio.")] = UNSET
    segments: Annotated[
        list[TranscriptSegment] | UnsetType,
        about("`verbose_json`: the parts of the text, unless only words are asked for."),
    ] = UNSET
    words: Annotated[
        list[TranscriptWord] | UnsetType, about("`verbose_json`: the words, if asked for.")
    ] = UNSET


class TranscriptTokens(msgspec.Struct, tag="tokens", tag_field="type"):
    """Tokens that a transcript used."""

    input_tokens: Annotated[int, about("Tokens of the prompts of all windows.")]
    output_tokens: Annotated[int, about("Tokens that were produced.")]
    total_tokens: Annotated[int, about("Both together.")]


class TextDeltaEvent(msgspec.Struct, tag="transcript.text.delta", tag_field="type"):
    """A new piece of the text."""

    delta: Annotated[str, about("The piece.")]


class TextDoneEvent(msgspec.Struct, tag="transcript.text.done", tag_field="type"):
    """The end of the text."""

    text: Annotated[str, about("The whole text.")]
    usage: Annotated[TranscriptTokens, about("Tokens of all windows.")]
