"""The options of a transcript, and the tokens that tell the model of them."""

from __future__ import annotations

import attrs

from trioserve.model_files.speech_config import SpeechConfig
from trioserve.model_files.speech_config import SpeechTask as SpeechTask
from trioserve.protocol.errors import InvalidRequest

ENGLISH = "en"


@attrs.frozen(kw_only=True)
class SpeechOptions:
    """The options of one transcript.

    Args:
        task: ``transcribe``, or ``translate`` into English.
        language: Code of the language that is spoken; None to detect it in the first window.
        prompt: Text that might precede each window of the audio, for its spelling and style.
        temperature: 0 for the most probable tokens. None for 0, and for higher ones where a
            window's text isn't plausible; windows without speech are then left out.
        condition_on_previous_text: True to have the text so far precede each window.
        timestamps: True for segments with their times. Windows then begin where the last segment
            ended, so none is cut.
        word_timestamps: True for the times of words.
    """

    task: SpeechTask = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperature: float | None = None
    timestamps: bool = False
    word_timestamps: bool = False
    condition_on_previous_text: bool = False

    def check(self, config: SpeechConfig) -> None:
        """Check the options against the model.

        Raises:
            InvalidRequest: The model doesn't know the language, or doesn't translate, or an option
                has a wrong type.
        """
        for name in ("task", "prompt", "language"):
            given = getattr(self, name)
            if not isinstance(given, str) and (given is not None or name != "language"):
                raise InvalidRequest(f"{name} must be a string, got {given!r}", param=name)
        if self.task not in ("transcribe", "translate"):
            raise InvalidRequest(
                f"task must be transcribe or translate, got {self.task[:40]!r}", param="task"
            )
        if self.task == "translate" and "translate" not in config.tasks:
            raise InvalidRequest(
                "this model doesn't translate: it knows English alone", param="model"
            )
        known = sorted(config.languages) or [ENGLISH]
        if self.language is not None and self.language not in known:
            raise InvalidRequest(
                "language must be the code of one that this model knows: "
                f"{', '.join(known)}; got {self.language[:40]!r}",
                param="language",
            )


def tokens_that_detect(config: SpeechConfig) -> tuple[int, ...]:
    """Return the prompt behind which the model gives the token of the language."""
    return (config.start_token,)


def tokens_before(
    config: SpeechConfig, options: SpeechOptions, language: str, previous: list[int]
) -> tuple[int, ...]:
    """Return the prompt of a window.

    Args:
        config: The model's tokens.
        options: Options of the transcript.
        language: Code of the language that is spoken.
        previous: Tokens of the text that might precede the audio.
    """
    tokens = [config.previous_text_token, *previous] if previous else []
    tokens.append(config.start_token)
    if config.languages:
        tokens += (config.languages[language], config.tasks[options.task])
    if not options.timestamps:
        tokens.append(config.no_timestamps_token)
    return tuple(tokens)
