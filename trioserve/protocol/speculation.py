"""The options of speculative decoding."""

from __future__ import annotations

import attrs

from trioserve.protocol.checks import boolean, integer, one_of, refuse
from trioserve.protocol.number_formats import QUANTIZATIONS

METHODS = ("suffix", "ngram", "draft_model")
MAX_SPECULATIVE_TOKENS = 31


def _model(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise refuse(attribute.name, value, "a string")


@attrs.frozen(kw_only=True)
class SpeculativeConfig:
    """The options of speculative decoding, with vLLM's names.

    ``suffix`` finds the longest suffix of a sequence that has occurred in it before, and drafts
    what followed. ``ngram`` looks for at most ``prompt_lookup_max`` tokens. ``draft_model`` drafts
    the most probable tokens of a smaller model.

    Raises:
        InvalidRequest: a field is out of its range; ``param`` names it.
    """

    method: str = attrs.field(default="suffix", validator=one_of(METHODS))
    num_speculative_tokens: int = attrs.field(
        default=15,
        validator=integer(
            1, f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}", high=MAX_SPECULATIVE_TOKENS
        ),
    )
    """Most draft tokens of a sequence in one step."""
    prompt_lookup_min: int = attrs.field(
        default=1, validator=integer(1, "an integer from 1 to 64", high=64)
    )
    """Fewest tokens that must have occurred before."""
    prompt_lookup_max: int = attrs.field(
        default=5, validator=integer(1, "an integer from 1 to 64", high=64)
    )
    """Most tokens of an n-gram, for ``ngram``."""

    model: str = attrs.field(default="", validator=_model)
    """Draft model: a folder, a GGUF file or a name, like the model."""
    quantization: str = attrs.field(default="auto", validator=one_of(QUANTIZATIONS))
    """Number format of the draft model's weights, as ``--quantization`` has it."""
    adaptive: bool = attrs.field(default=True, validator=boolean)
    """False to verify all drafts that are found, whatever they cost."""

    @property
    def max_row_tokens(self) -> int:
        """Most tokens that a sequence can get in one step."""
        return 1 + self.num_speculative_tokens

    def __attrs_post_init__(self) -> None:
        if (self.method == "draft_model") != bool(self.model):
            wanted = "a model" if self.method == "draft_model" else "left out without draft_model"
            raise refuse("model", self.model, wanted)
        if self.quantization != "auto" and not self.model:
            raise refuse("quantization", self.quantization, "left out without draft_model")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            wanted = f"at least prompt_lookup_min ({self.prompt_lookup_min})"
            raise refuse("prompt_lookup_max", self.prompt_lookup_max, wanted)
