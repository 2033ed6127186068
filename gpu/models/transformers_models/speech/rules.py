"""The tokens that may come next in a transcript, as a logits processor.

They are a function of the slot's tokens alone: the prompt's last token says what is asked for. The
rules are those of Whisper's published decoding, in transformers' order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from trioserve.model_files.speech_config import SpeechConfig
from trioserve.protocol.logits_processors import ProcessorRow


class SpeechRules:
    """The :class:`~trioserve.protocol.logits_processors.LogitsProcessor` of a Whisper model.

    Args:
        config: The model's tokens.
    """

    parameters: tuple[str, ...] = ()

    def __init__(self, config: SpeechConfig) -> None:
        self._config = config
        self._never = list(config.never)
        self._never_first = list(config.never_first)
        self._languages = list(config.languages.values())

    def check(self, args: Mapping[str, Any]) -> bool:
        """Return True: all requests of such a model are transcripts."""
        return True

    def open(self, slot: int, args: Mapping[str, Any]) -> None:
        """Do nothing: all that the rules need is among a slot's tokens."""

    def close(self, slot: int) -> None:
        """Do nothing; see :meth:`open`."""

    def apply(self, logits: torch.Tensor, bias: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        """Forbid the tokens that may not come next."""
        for row in rows:
            last, output = int(row.tokens[row.prompt_length - 1]), row.tokens[row.prompt_length :]
            own = bias[row.index]
            if last == self._config.start_token and self._languages:
                _allow_only(own, self._languages)
                continue
            own[self._never] = -torch.inf
            if not len(output):
                own[self._never_first] = -torch.inf
            if last != self._config.no_timestamps_token:
                self._limit_timestamps(logits[row.index], own, output.tolist())

    def _limit_timestamps(
        self, logits: torch.Tensor, bias: torch.Tensor, output: list[int]
    ) -> None:
        """Let timestamps come in pairs, except before the end, and never decrease."""
        config = self._config
        first = config.first_timestamp
        bias[config.no_timestamps_token] = -torch.inf
        closes_pair = len(output) < 2 or output[-2] >= first
        if output and output[-1] >= first:
            if closes_pair:
                bias[first:] = -torch.inf
            else:
                bias[: config.end_token] = -torch.inf
        if (latest := _latest_timestamp(output, first)) is not None:
            repeats = output[-1] >= first and not closes_pair
            bias[first : latest + (not repeats)] = -torch.inf
        if not output:
            bias[:first] = -torch.inf
            if config.most_initial_timestamp is not None:
                bias[first + config.most_initial_timestamp + 1 :] = -torch.inf
        # Any timestamp is likelier than each of the other tokens.
        scores = (logits + bias).float()
        if scores[first:].logsumexp(-1) > scores[:first].max():
            bias[:first] = -torch.inf


def _allow_only(bias: torch.Tensor, tokens: list[int]) -> None:
    kept = bias[tokens].clone()
    bias[:] = -torch.inf
    bias[tokens] = kept


def _latest_timestamp(output: Iterable[int], first: int) -> int | None:
    """Return the last timestamp among the tokens; None if there is none."""
    return next((token for token in reversed(list(output)) if token >= first), None)
