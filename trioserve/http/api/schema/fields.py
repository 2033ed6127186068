"""Fields that requests of several APIs share: a type, its range, and its meaning.

A request class names each of its own fields, and takes the shared ones from here. The ranges are
those of :mod:`trioserve.protocol.sampling` and :mod:`trioserve.protocol.checks`, so that the schema
contains them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.http.api.schema import reading as schemas
from trioserve.http.api.schema.reading import Count, Salt, Seconds, about
from trioserve.http.api.schema.retention import KvCacheRetentionConfig
from trioserve.protocol.checks import MAX_LOGIT_BIAS
from trioserve.protocol.sampling import MAX_EXTRA_ARGS, MAX_STOP_STRINGS, MAX_STRING_CHARACTERS
from trioserve.requests.media_arguments import MAX_ARGUMENTS

Model = Annotated[str | None, about("A name out of `/v1/models`; the first of them by default.")]

UseBeamSearch = Annotated[
    bool | None,
    about(
        "Search for the most probable outputs with several beams instead of sampling. All "
        "come at the end, the best first; `logprobs` are processed ones."
    ),
]
BEAM_LOGPROB = about(
    "The sum of the log-probabilities of all tokens of an output of beam search, in its last event."
)
Temperature = Annotated[
    Annotated[float, msgspec.Meta(ge=0, le=100)] | None,
    about("Divides the logits; 0 takes the most probable token."),
]
TopP = Annotated[
    Annotated[float, msgspec.Meta(gt=0, le=1)] | None,
    about("Draw from the smallest set of tokens with at least this total probability."),
]
TopK = Annotated[
    Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None,
    about("Draw from this many most probable tokens; -1 or 0 for all."),
]
MinP = Annotated[
    Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
    about("Draw from tokens at least this many times as probable as the best one."),
]
RepetitionPenalty = Annotated[
    Annotated[float, msgspec.Meta(gt=0)] | None,
    about("Above 1, makes tokens of prompt and output less probable; below 1, more."),
]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
FrequencyPenalty = Annotated[
    _Penalty | None, about("Subtracted from a token's logit for each time it is in the output.")
]
PresencePenalty = Annotated[
    _Penalty | None, about("Subtracted from a token's logit if it is in the output.")
]
LogitBias = Annotated[
    Annotated[
        dict[
            Annotated[str, msgspec.Meta(pattern="^[0-9]{1,10}$")],
            Annotated[float, msgspec.Meta(ge=-100, le=100)],
        ],
        msgspec.Meta(max_length=MAX_LOGIT_BIAS),
    ]
    | None,
    about("Added to logits: numbers by token id, as a string."),
]
Seed = Annotated[
    schemas.Seed | None, about("With the same seed, the same request draws the same numbers.")
]
ProcessorArguments = Annotated[
    Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_EXTRA_ARGS)] | None,
    about("Parameters for the server's own logits processors (`--logits-processors`)."),
]

MediaProcessorArguments = Annotated[
    Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_ARGUMENTS)] | None,
    about(
        "Arguments of the model's processor of media for this request, over those of "
        "`--mm-processor-kwargs`. Without media they have no effect."
    ),
]
MediaReadingArguments = Annotated[
    Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_ARGUMENTS)] | None,
    about(
        "Frames that are taken of this request's videos, over those of `--media-io-kwargs`: "
        '`{"video": {"fps": …, "num_frames": …}}`.'
    ),
]

_ShortString = Annotated[str, msgspec.Meta(max_length=MAX_STRING_CHARACTERS)]
StopStrings = (
    _ShortString | Annotated[list[_ShortString], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
)
"""One string or several, for ``stop`` and ``stop_regex``."""
Stop = Annotated[
    StopStrings | None,
    about(
        "Strings that end the output where they first occur in its text; an empty one has "
        "no effect."
    ),
]
IgnoreEos = Annotated[
    bool | None, about("Don't end the output at the model's own end of sequence.")
]
MinTokens = Annotated[
    Count | None,
    about("Number of tokens before which no stop id and no stop string ends the output."),
]
IncludeStop = Annotated[
    bool | None, about("Leave the stop string or token that ended the output in its text.")
]
SkipSpecialTokens = Annotated[
    bool | None, about("Leave special tokens out of the text; true by default.")
]

ReasoningEffort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    about(
        "For the chat template; refused if the template ignores it. `none` is also served by "
        "a model that never reasons and by a template that can turn reasoning off."
    ),
]
ChatTemplateArguments = Annotated[
    dict[str, Any] | None, about("More arguments for the chat template, such as `enable_thinking`.")
]
ParallelToolCalls = Annotated[
    bool | None, about("If false, an answer has at most one call, enforced by a grammar.")
]

Priority = Annotated[
    schemas.Priority | None,
    about("Smaller numbers run sooner; it needs `--scheduling-policy priority`."),
]
CacheSalt = Annotated[
    Salt | None, about("Cached prompts are shared only among requests of the same salt.")
]
ExtraKey = Annotated[str | None, about("SGLang's name of `cache_salt`.")]
KvCacheRetention = Annotated[
    KvCacheRetentionConfig | None,
    about("Priority of its KV in the prefix cache once it has ended."),
]
Timeout = Annotated[Seconds | None, about("Seconds after which the request ends with an error.")]
