"""Small tokenizers of every kind that the text path treats differently, built on the spot."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

SAMPLE = [
    "The quick brown fox jumps over the lazy dog. Stop here, and don't stop there!",
    "你好，世界。今天天气怎么样？",  # noqa: RUF001
    "안녕하세요 세계, 반갑습니다",
    "emoji 👩‍👩‍👧‍👦 and 🌶️ and 🇩🇪, naïve café — “quotes”",
    "สวัสดีชาวโลก नमस्ते दुनिया",
]


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes as characters, every token a byte string, specials and added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens(["<think>", "two words", "déjà"])
    tokenizer.add_special_tokens([AddedToken("<|ünïcode|>", special=True)])
    return tokenizer


@functools.cache
def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: ▁ for spaces, ``<0xE4>`` for the bytes of what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzT.,!?é你"]
    words = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("s", "t"), ("o", "p")]
    words += [("st", "op"), ("▁", "▁")]
    pieces += [left + right for left, right in words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, words, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@functools.cache
def metaspace() -> tokenizers.Tokenizer:
    """T5's kind: the first token's ▁ goes, and that depends on its place."""
    pieces = ["▁hello", "▁world", "lo", "▁", "a", "b", "\ufffd", "<s>", "▁x▁y"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@functools.cache
def words() -> tokenizers.Tokenizer:
    """Return a tokenizer without a decoder: tokens joined by spaces."""
    names = ["zero", "one", "two", "three", "four", "stop", "<s>"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer
