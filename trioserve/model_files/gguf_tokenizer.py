"""A tokenizer made from a GGUF file's metadata.

``tokenizer.ggml.model`` has one of two kinds. ``gpt2`` is byte-level BPE with merges in the file;
``tokenizer.ggml.pre`` names the rule that splits text before merging. ``llama`` is SentencePiece's
BPE: spaces become ``▁``, characters outside of the vocabulary fall back to bytes, and a merge is
ranked by the score of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from trioserve.model_files.gguf import CONTROL
from trioserve.model_files.gguf_header import GGUFHeader
from trioserve.model_files.native import refused_by_tokenizers
from trioserve.protocol.errors import ModelLoadError

_MAX_PIECE_CHARACTERS = 1024
"""Longest SentencePiece piece; its trainer allows 16. Splitting takes quadratic time."""
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)


@attrs.frozen
class _Splitting:
    """The splitting rule of a ``tokenizer.ggml.pre``.

    A ``pattern`` of None is GPT-2's. With ``whole_words``, a piece that is a token isn't merged.
    ``add_bos`` is the default if the file has no value.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False
    compose: bool = False
    """True to normalize text to NFC first."""


_GPT2 = _Splitting()
_SMOLLM = _Splitting(single_digits=True)
_LLAMA_BPE = _Splitting(_LLAMA3, whole_words=True, add_bos=True)
_PRE: dict[str, _Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "qwen2": _Splitting(_QWEN2, compose=True),
    "deepseek-r1-qwen": _Splitting(_QWEN2),
    "tekken": _Splitting(_TEKKEN, whole_words=True, add_bos=True),
}


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """Return the tokenizer that the metadata describes.

    Raises:
        ModelLoadError: The metadata is incomplete, or of an unsupported kind.
    """
    vocabulary = _Vocabulary.read(header)
    kind = header.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ModelLoadError(
            f"{header.path}: the tokenizer {kind} isn't served; gpt2 and llama are"
        )
    with refused_by_tokenizers(header.path):
        tokenizer, add_bos = _KINDS[kind](header, vocabulary)
        _add_special(tokenizer, vocabulary)
        _add_template(tokenizer, header, vocabulary, add_bos)
    return tokenizer


@attrs.frozen
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, header: GGUFHeader) -> _Vocabulary:
        tokens = header.texts("tokenizer.ggml.tokens")
        if not tokens:
            raise _incomplete(header, "tokenizer.ggml.tokens")
        kinds = header.numbers("tokenizer.ggml.token_type").tolist() or [_NORMAL] * len(tokens)
        ids = {token: i for i, token in enumerate(tokens)}
        if len(kinds) != len(tokens) or len(ids) != len(tokens):
            raise ModelLoadError(
                f"{header.path} is damaged: its vocabulary is inconsistent; fetch it again"
            )
        return cls(tokens, kinds, ids)


def _incomplete(header: GGUFHeader, key: str) -> ModelLoadError:
    return ModelLoadError(f"{header.path} has no {key}: convert the model again")


def _byte_level(header: GGUFHeader, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    pre = header.text("tokenizer.ggml.pre", "default")
    splitting = _PRE.get(str(pre))
    if splitting is None:
        known = ", ".join(_PRE)
        raise ModelLoadError(f"{header.path}: the pre-tokenizer {pre} isn't served; {known} are")
    if "tokenizer.ggml.merges" not in header.metadata:
        raise _incomplete(header, "tokenizer.ggml.merges")
    merges = [_merge(line) for line in header.texts("tokenizer.ggml.merges")]
    for left, right in merges:
        if not (
            left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids
        ):
            raise ModelLoadError(
                f"{header.path} is damaged: the merge {left!r} {right!r} isn't in its vocabulary; "
                "fetch it again"
            )
    model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=splitting.whole_words)
    tokenizer = Tokenizer(model)
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.add_bos


def _merge(line: str) -> tuple[str, str]:
    # The separator is the space in the middle; in a few files a piece starts with one.
    left, _, right = line[1:].partition(" ")
    return line[:1] + left, right


def _pre_tokenizer(splitting: _Splitting) -> Any:
    steps: list[Any] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    )
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _sentencepiece(header: GGUFHeader, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise _incomplete(header, "tokenizer.ggml.scores")
    unknown = [
        t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN
    ]
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(vocabulary, scores.tolist()),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


_KINDS: dict[str | None, Callable[[GGUFHeader, _Vocabulary], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""Functions that make the tokenizer and return the default of adding BOS, by
``tokenizer.ggml.model``.
"""


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that form a piece, the best piece first.

    SentencePiece merges the neighbours that form the best piece, so all pairs of one piece have one
    rank. In BPE's list of merges these pairs are adjacent.
    """
    ids = vocabulary.ids
    found: list[tuple[float, int, int, str, str]] = []
    for piece, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True):
        if kind != _NORMAL:
            continue
        if len(piece) > _MAX_PIECE_CHARACTERS:
            raise ValueError(f"its vocabulary has a piece of {len(piece)} characters")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add control tokens as special tokens; these and user-defined ones are never split."""
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in (CONTROL, _UNKNOWN, _USER_DEFINED)
        ]
    )


def _add_template(
    tokenizer: Tokenizer, header: GGUFHeader, vocabulary: _Vocabulary, add_bos: bool
) -> None:
    """Add BOS and EOS to texts, if the file or the default of its kind says so."""
    bos = _special(header, vocabulary, "bos", add_bos)
    eos = _special(header, vocabulary, "eos", False)
    if bos is None and eos is None:
        return
    names = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*names, *(name.replace("$A", "$B") + ":1" for name in names)]
    special = {token for token in (bos, eos) if token is not None}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=names,
        pair=pair,
        special_tokens=[(token, vocabulary.ids[token]) for token in sorted(special)],
    )


def _special(header: GGUFHeader, vocabulary: _Vocabulary, name: str, default: bool) -> str | None:
    """Return the text of BOS or EOS if it is added to texts, else None."""
    if not header.flag(f"tokenizer.ggml.add_{name}_token", default):
        return None
    token = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(token, int) or not 0 <= token < len(vocabulary.tokens):
        raise _incomplete(header, f"tokenizer.ggml.{name}_token_id")
    return vocabulary.tokens[token]
