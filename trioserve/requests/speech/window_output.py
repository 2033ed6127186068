"""The output of a window, and whether it is plausible by Whisper's published decoding."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.requests.speech.transcript import compression_ratio

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried in turn, until an output is plausible."""
MOST_COMPRESSION = 2.4
"""Highest compression ratio of a text that doesn't repeat itself."""
LEAST_LOGPROB = -1.0
"""Lowest mean log-probability of an output that the model is sure of."""
MOST_SILENCE = 0.6
"""Highest probability of silence with which an unsure output may be speech."""
MOST_FOLLOWED = 0.5
"""Highest temperature of an output that may precede the next window."""


@attrs.frozen(kw_only=True)
class WindowOutput:
    """The output of a window."""

    tokens: Sequence[int]
    """Tokens with timestamps, without the one of the end."""
    text: str
    average_logprob: float
    """Mean log-probability of the tokens and that of the end."""
    no_speech_prob: float
    """Probability that there is no speech in the window."""
    temperature: float
    """Temperature at which the tokens were drawn."""

    @property
    def is_silent(self) -> bool:
        """True if the window has no speech, so that the text is made up."""
        return self.no_speech_prob > MOST_SILENCE and self.average_logprob < LEAST_LOGPROB

    @property
    def is_plausible(self) -> bool:
        """True if no other output is needed."""
        is_sure = self.average_logprob >= LEAST_LOGPROB
        repeats_itself = compression_ratio(self.text) > MOST_COMPRESSION
        return self.is_silent or (is_sure and not repeats_itself)
