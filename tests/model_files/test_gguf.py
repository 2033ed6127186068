"""GGUF headers, configurations and tokenizers, against the gguf package and slow references."""

from __future__ import annotations

import functools
import itertools
import struct
from pathlib import Path
from typing import Any

import attrs
import gguf
import jinja2.sandbox
import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny, tiny_tokenizer
from trioserve.model_files import ModelConfig, RopeScaling, locate, open_model
from trioserve.model_files.gguf import read_gguf_config
from trioserve.model_files.gguf_header import TENSOR_TYPES, GGUFHeader, GGUFTensor, read_header
from trioserve.model_files.gguf_tokenizer import build_tokenizer
from trioserve.protocol.errors import ModelLoadError


def error_of(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_model(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("smollm2", tmp_path_factory.mktemp("smollm2"))
    return write_gguf(folder, folder / "tiny.gguf")


# --- the header ---


def test_the_header_equals_the_gguf_packages_reading(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(f"a.{name}", 7)
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grün 😀")
    writer.add_array("a.texts", ["", "one", "zwei ½"])
    writer.add_array("a.floats", [1.5, -2.0])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    writer.add_custom_alignment(64)
    writer.add_tensor("b.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("c.weight", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    plain = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in header.metadata.items()
    }
    assert plain == fields
    assert len(plain) == 18
    assert header.data_offset == reader.data_offset
    assert [
        (t.name, list(t.shape), t.type.name, t.offset, t.num_bytes) for t in header.tensors.values()
    ] == [
        (t.name, t.shape.tolist()[::-1], t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]


def test_a_truncated_file_is_named_wherever_it_ends(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    start = read_header(tiny).data_offset
    path = tmp_path / "cut.gguf"
    cuts = [*range(60), *range(60, start, 997), start - 100, start, len(whole) - 200]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        message = error_of(path)
        assert "fetch it again" in message


def test_a_flipped_byte_in_the_header_is_an_error_or_another_header(
    tiny: Path, tmp_path: Path
) -> None:
    whole = tiny.read_bytes()
    path = tmp_path / "flipped.gguf"
    refused = 0
    for position in range(0, 600, 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            open_model(path)
        except ModelLoadError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"PK\3\4", "is no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
    ],
)
def test_other_files_are_refused(start: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(start + b"\0" * 64)
    assert reason in error_of(path)


def test_a_tensor_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 18), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "tensor blk.0.attn_q.weight has the type IQ4_NL" in error_of(path)


# --- the configuration ---


@pytest.mark.parametrize(
    "family",
    [
        *("llama2", "smollm2", "smollm3", "mistral", "qwen2", "qwen3", "llama_linear"),
        *("mixtral", "qwen3_moe"),
    ],
)
def test_the_configuration_equals_the_folders(family: str, tmp_path: Path) -> None:
    overrides: dict[str, dict[str, Any]] = {
        "smollm3": {"no_rope_layer_interval": 4},
        "qwen3_moe": {"norm_topk_prob": True},  # as llama.cpp takes it to be
    }
    folder = make_tiny(family, tmp_path, **overrides.get(family, {}))
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    metadata = linear if family == "llama_linear" else None
    config = open_model(write_gguf(folder, tmp_path / "tiny.gguf", metadata=metadata)).config
    expected = open_model(folder).config
    if family == "mistral":  # GGUF files of Mistral models call themselves llama
        expected = attrs.evolve(expected, family="llama")
    eps = pytest.approx(expected.rms_norm_eps)
    assert config.rms_norm_eps == eps
    assert config.eos_token_ids == (2, 0)
    same = attrs.evolve(
        config, rms_norm_eps=expected.rms_norm_eps, eos_token_ids=expected.eos_token_ids
    )
    assert same == expected


def test_a_file_may_say_that_experts_are_not_normalized(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path)
    header = read_header(write_gguf(folder, tmp_path / "tiny.gguf"))
    for written, normalized in ((None, True), (True, True), (False, False)):
        metadata = header.metadata
        if written is not None:
            metadata = {**metadata, "qwen3moe.expert_weights_norm": written}
        experts = read_gguf_config(attrs.evolve(header, metadata=metadata)).experts
        assert experts is not None
        assert experts.normalized == normalized
        assert experts.layers == (True, False, True)


def test_only_llama_and_qwen3moe_have_experts(tmp_path: Path) -> None:
    path = write_gguf(make_tiny("qwen2", tmp_path), tmp_path / "tiny.gguf")
    header = read_header(path)
    metadata = {**header.metadata, "qwen2.expert_count": 4, "qwen2.expert_used_count": 2}
    with pytest.raises(ModelLoadError, match=r"qwen2\.expert_count = 4"):
        read_gguf_config(attrs.evolve(header, metadata=metadata))


def test_biases_are_found_by_their_tensors(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path)
    config = open_model(write_gguf(folder, tmp_path / "tiny.gguf")).config
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_rope_factors_are_those_of_llama3(tmp_path: Path) -> None:
    """Compare with transformers: Llama 3's scaling is the plain frequencies over the factors."""
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = make_tiny("llama3", tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / scaled.numpy()).astype(np.float32)
    assert factors.min() == 1.0
    assert factors.max() == pytest.approx(8.0)
    path = write_gguf(folder, tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": factors})
    scaling = open_model(path).config.rope_scaling
    assert scaling == RopeScaling(kind="factors", frequency_factors=tuple(factors.tolist()))


def test_yarn_in_the_metadata(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path)
    yarn: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 512,
    }
    config = open_model(write_gguf(folder, tmp_path / "a.gguf", metadata=yarn)).config
    assert config.rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_position_embeddings=512
    )
    assert config.max_position_embeddings == 2048
    yarn["rope.scaling.attn_factor"] = 0.5
    scaling = open_model(write_gguf(folder, tmp_path / "b.gguf", metadata=yarn)).config.rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


def test_other_spellings_of_the_metadata(tiny: Path) -> None:
    """Linear scaling as files of 2023 have it, and one number for each layer."""
    header = read_header(tiny)
    metadata = {
        **header.metadata,
        "llama.rope.scale_linear": 4.0,
        "llama.attention.head_count_kv": np.array([2, 2], np.int32),
    }
    config = read_gguf_config(attrs.evolve(header, metadata=metadata))
    assert config.num_kv_heads == 2
    assert config.rope_scaling == RopeScaling(
        kind="linear", factor=4.0, original_max_position_embeddings=512
    )


def test_what_is_not_served_is_named(tiny: Path, tmp_path: Path) -> None:
    header = read_header(tiny)

    def reason(
        drop_tensor: str | None = None, add: GGUFTensor | None = None, **metadata: Any
    ) -> str:
        changed = {key.replace("__", "."): value for key, value in metadata.items()}
        merged = {k: v for k, v in {**header.metadata, **changed}.items() if v is not None}
        tensors = {name: t for name, t in header.tensors.items() if name != drop_tensor}
        if add is not None:
            tensors[add.name] = add
        with pytest.raises(ModelLoadError) as caught:
            read_gguf_config(attrs.evolve(header, metadata=merged, tensors=tensors))
        return str(caught.value)

    assert "architecture gemma3 isn't served" in reason(general__architecture="gemma3")
    assert "has no llama.expert_used_count" in reason(llama__expert_count=8)
    experts = {"llama__expert_count": 8, "llama__expert_used_count": 2}
    assert "expert_shared_count = 1" in reason(**experts, llama__expert_shared_count=1)
    assert "expert_gating_func = 2" in reason(**experts, llama__expert_gating_func=2)
    ones = np.ones(2, np.int32)
    assert "expert_weights_scale = [1 1]" in reason(**experts, llama__expert_weights_scale=ones)
    assert "expert_weights_norm = [1 1]" in reason(**experts, llama__expert_weights_norm=ones)
    assert "can't have 9 of 8 experts" in reason(**{**experts, "llama__expert_used_count": 9})
    assert "can't have 70000 experts" in reason(**{**experts, "llama__expert_count": 70000})
    assert "llama.rope.dimension_count = 8" in reason(llama__rope__dimension_count=8)
    assert "has no llama.block_count" in reason(llama__block_count=None)
    assert "longrope" in reason(llama__rope__scaling__type="longrope")
    assert "no tensor output_norm.weight" in reason("output_norm.weight")
    factors = GGUFTensor("rope_freqs.weight", (8,), TENSOR_TYPES[0], 0, 32)
    both = reason(add=factors, llama__rope__scaling__type="linear")
    assert "linear beside rope_freqs.weight" in both
    half = attrs.evolve(factors, type=TENSOR_TYPES[1])
    assert "rope_freqs.weight = F16" in reason(add=half)
    assert "llama.rope.freq_base = -1.0" in reason(llama__rope__freq_base=-1.0)
    assert "llama.block_count = 3" in reason(llama__block_count=3)
    counts = np.array([2, 1], np.int32)
    assert "head_count_kv = [2 1]" in reason(llama__attention__head_count_kv=counts)


def test_a_split_file_says_how_to_merge_it(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "llama-gguf-split --merge" in error_of(path)


# --- the default model ---


@functools.cache
def real_header() -> GGUFHeader:
    return read_header(locate("smollm2-135m"))


@functools.cache
def real_tokenizer() -> Tokenizer:
    return build_tokenizer(real_header())


def test_the_default_models_files() -> None:
    files = open_model(locate("smollm2-135m"))
    assert files.name == "smollm2-135m"
    assert files.format == "gguf"
    assert files.bos_token == "<|im_start|>"
    assert files.eos_token == "<|im_end|>"
    assert files.generation.shown() == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}
    assert len(files.checksum()) == 32
    config = files.config
    assert config == ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        windows=(None,) * 30,
        rope_layers=(True,) * 30,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2, 0),
    )
    assert config.rms_norm_eps == pytest.approx(1e-5)


def test_the_default_models_chat_template() -> None:
    template = open_model(locate("smollm2-135m")).chat_template
    assert template is not None
    text = (
        jinja2.sandbox.SandboxedEnvironment()
        .from_string(template)
        .render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    )
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = real_tokenizer().encode(text).tokens
    assert tokens.count("<|im_start|>") == 3
    assert tokens.count("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("\t\t3", ["ĉĉ", "3"]),
        (" ½", ["Ġ", "Â½"]),
        ("Hello 1234 world", ["Hello", "Ġ", "1", "2", "3", "4", "Ġworld"]),
        ("it's", ["it", "'s"]),
        ("a<|im_end|>b", ["a", "<|im_end|>", "b"]),
        ("", []),
    ],
)
def test_known_answers(text: str, tokens: list[str]) -> None:
    assert real_tokenizer().encode(text).tokens == tokens


_GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@functools.cache
def control_tokens() -> regex.Pattern[str]:
    tokens = real_header().metadata["tokenizer.ggml.tokens"]
    types = real_header().metadata["tokenizer.ggml.token_type"]
    return regex.compile("|".join(regex.escape(tokens[i]) for i in np.flatnonzero(types == 3)))


@functools.cache
def byte_letters() -> dict[int, str]:
    """GPT-2's letter for every byte: printable ones stand for themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return {**letters, **{byte: chr(256 + i) for i, byte in enumerate(rest)}}


@functools.cache
def missing_bytes() -> set[int]:
    return {b for b, letter in byte_letters().items() if not real_tokenizer().token_to_id(letter)}


@functools.cache
def merge_ranks() -> dict[tuple[str, ...], int]:
    lines = real_header().metadata["tokenizer.ggml.merges"]
    return {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}


def reference_tokens(text: str) -> list[str]:
    """Byte-level BPE by its definition: digits apart, GPT-2's words, best-ranked pair first.

    This vocabulary lacks the bytes that its training text lacked; those are left out.
    """
    tokens: list[str] = []
    for part in regex.split(r"(\p{N})", text):
        for word in _GPT2.findall(part):
            symbols = [byte_letters()[byte] for byte in word.encode()]
            while len(symbols) > 1:
                ranks = [
                    (merge_ranks().get(pair, 1 << 30), i)
                    for i, pair in enumerate(itertools.pairwise(symbols))
                ]
                rank, best = min(ranks)
                if rank == 1 << 30:
                    break
                symbols[best : best + 2] = ["".join(symbols[best : best + 2])]
            tokens += [symbol for symbol in symbols if real_tokenizer().token_to_id(symbol)]
    return tokens


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_WORDS = st.lists(
    st.sampled_from([*"aeiot .,'\n\t½٣7é漢😀", "the", " world", "  ", "'ll", "\r\n", "x1"]),
    max_size=12,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(_TEXT | _WORDS)
@example("\t\t3")
@example(" ½ \u00a02\u3000\u0085x")
def test_encoding_equals_the_slow_reference(text: str) -> None:
    if not control_tokens().search(text):
        assert real_tokenizer().encode(text).tokens == reference_tokens(text)


@settings(max_examples=150, deadline=None)
@given(_TEXT | _WORDS)
@example("<|im_start|>user\n<|im_end|>")
def test_decoding_gives_the_text_back(text: str) -> None:
    if not any(byte in missing_bytes() for byte in text.encode()):
        ids = real_tokenizer().encode(text).ids
        assert real_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary_lacks_only_bytes_that_text_does_without() -> None:
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    planes_4_to_11 = {0xF1, 0xF2}  # no character is assigned there
    controls = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}
    assert missing_bytes() == never_in_utf8 | planes_4_to_11 | controls


# --- other tokenizers ---


_BYTE_LEVEL: dict[str, Any] = {"model": "gpt2", "merges": [], "bos_token_id": 0, "eos_token_id": 1}


def header_of(
    tokens: list[str] | None = None, types: list[int] | None = None, **metadata: Any
) -> GGUFHeader:
    """Return a header with a tokenizer and nothing else."""
    tokens = ["a", "b"] if tokens is None else tokens
    kinds = types or [1] * len(tokens)
    keys = {"tokens": tokens, "token_type": np.array(kinds, np.int32), **metadata}
    prefixed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return GGUFHeader(Path("test.gguf"), prefixed, {}, 0)


def byte_level(extra: list[str], **metadata: Any) -> Tokenizer:
    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), *extra]
    types = [3, 3] + [1] * (len(tokens) - 2)
    return build_tokenizer(header_of(tokens, types, **{**_BYTE_LEVEL, **metadata}))


def words(pre: str, text: str) -> list[str]:
    tokenizer = byte_level([], pre=pre)
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


_SAMPLE = "I'LL pay 12345€ \n\n  toDay's/x"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", "€", " \n\n ", " toDay", "'s", "/", "x"]),
        (
            "smollm",
            ["I", "'", "LL", " pay", " ", *"12345", "€", " \n\n ", " toDay", "'s", "/", "x"],
        ),
        (
            "llama-bpe",
            ["I", "'LL", " pay", " ", "123", "45", "€", " \n\n", " ", " toDay", "'s", "/x"],
        ),
        ("qwen2", ["I", "'LL", " pay", " ", *"12345", "€", " \n\n", " ", " toDay", "'s", "/x"]),
        (
            "tekken",
            ["I", "'LL", " pay", " ", *"12345", "€", " \n\n", " ", " to", "Day", "'s", "/x"],
        ),
    ],
)
def test_the_pre_tokenizers_split_as_they_are_known_to(pre: str, expected: list[str]) -> None:
    assert "".join(expected) == _SAMPLE
    assert words(pre, _SAMPLE) == expected


def test_a_whole_word_needs_no_merges_in_llama_3s_tokenizer() -> None:
    assert byte_level(["hello"], pre="llama-bpe", add_bos_token=False).encode("hello").ids == [258]
    assert len(byte_level(["hello"], pre="qwen2").encode("hello").ids) == 5


def test_qwens_text_is_composed_first() -> None:
    tokenizer = byte_level([], pre="qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "\u00e9"


def test_bos_and_eos_are_added_where_the_file_or_the_kind_says_so() -> None:
    def ids(**metadata: Any) -> list[int]:
        encoded = byte_level([], **metadata).encode("").ids
        assert isinstance(encoded, list)
        return encoded

    assert ids(pre="gpt-2") == []
    assert ids(pre="gpt-2", add_bos_token=True) == [0]
    assert ids(pre="gpt-2", add_bos_token=True, add_eos_token=True) == [0, 1]
    assert ids(pre="llama-bpe") == [0]
    assert ids(pre="llama-bpe", add_bos_token=False) == []
    tokenizer = byte_level([], pre="llama-bpe")
    assert tokenizer.encode("", add_special_tokens=False).ids == []


def test_user_defined_tokens_are_found_in_text_and_are_not_special() -> None:
    tokens = ["<eos>", *sorted(ByteLevel.alphabet()), "  tool  "]
    types = [3, *[1] * 256, 4]
    header = header_of(tokens, types, model="gpt2", pre="gpt-2", merges=[])
    tokenizer = build_tokenizer(header)
    ids = tokenizer.encode("a  tool  b<eos>").ids
    assert ids[1] == 257
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "a  tool  b"


def test_the_tiny_models_tokenizer_comes_out_as_it_went_in(tiny: Path) -> None:
    files = open_model(tiny)
    ours, original = files.load_tokenizer(), tiny_tokenizer()
    assert files.chat_template == CHAT_TEMPLATE
    for text in ("hello there, you", "<|im_start|>the world<|im_end|>", "½ 漢字 😀\n"):
        assert ours.encode(text).ids == original.encode(text).ids
    assert ours.get_vocab() == original.get_vocab()


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"model": "bert"}, "the tokenizer bert isn't served"),
        ({"pre": "dbrx"}, "the pre-tokenizer dbrx isn't served"),
        ({"merges": ["a zz"]}, "the merge 'a' 'zz'"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
        ({"tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "its vocabulary is inconsistent"),
        ({"add_bos_token": True, "bos_token_id": 999}, "has no tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_tokenizer_that_cant_be_built_says_why(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        build_tokenizer(header_of(**{**_BYTE_LEVEL, **metadata}))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_level_tokenizer_needs_its_merges() -> None:
    header = header_of(model="gpt2", pre="gpt-2")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.ggml\.merges"):
        build_tokenizer(header)


_PIECES = ["ab", "▁a", "bc", "abc", "▁ab", "▁abc", "cab", "é"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPM_TOKENS = ["<unk>", "<s>", "</s>", *_BYTES, *_PIECES, "▁", "a", "b", "c"]


def sentencepiece(**metadata: Any) -> Tokenizer:
    types = [2, 3, 3, *[6] * 256, *[1] * 12]
    scores = [0.0] * 259 + [-1.0 - rank for rank in range(12)]
    keys = {"model": "llama", "scores": np.array(scores, np.float32), "bos_token_id": 1, **metadata}
    return build_tokenizer(header_of(_SPM_TOKENS, types, **keys))


def reference_pieces(text: str) -> list[str]:
    """Return SentencePiece's BPE by its definition: merge the best-scored piece first, leftmost."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    rank = {piece: i for i, piece in enumerate(_SPM_TOKENS) if i >= 259}
    while True:
        pairs = [
            (rank[left + right], i)
            for i, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in rank
        ]
        if not pairs:
            break
        _, best = min(pairs)
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    pieces: list[str] = []
    for symbol in symbols:
        known = symbol in rank
        pieces += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


@settings(max_examples=200, deadline=None)
@given(st.text("abc é漢\n", max_size=20))
def test_sentencepiece_equals_the_slow_reference(text: str) -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    encoded = tokenizer.encode(text)
    assert encoded.tokens == reference_pieces(text)
    assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_adds_bos_unless_told_otherwise_and_a_space_unless_told_otherwise() -> None:
    assert sentencepiece().encode("ab").tokens == ["<s>", "▁ab"]
    plain = sentencepiece(add_bos_token=False, add_space_prefix=False)
    assert plain.encode("ab ab").tokens == ["ab", "▁ab"]
    assert plain.decode(plain.encode(" ab").ids) == " ab"
    assert sentencepiece().decode(sentencepiece().encode("</s>ab").ids) == "ab"
