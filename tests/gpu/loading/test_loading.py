"""The limits that an engine gets from a model's files and the options; progress of loading."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny
from trioserve import EngineConfig, ModelLoadError
from trioserve.cli import loading as cli_loading
from trioserve.cli.loading import LoadingReport
from trioserve.engine.loaded_model import LoadedModel
from trioserve.engine.worker_start import start_message
from trioserve.model_files import open_model
from trioserve.protocol import wire
from trioserve.requests.prompts import ChatPrompt
from trioserve.testing.fake_engine import byte_tokenizer

HELLO = ChatPrompt(messages=({"role": "user", "content": "hello"},))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("model") / "tiny-llama")


def load(folder: Path, **options: str) -> LoadedModel:
    return LoadedModel.load(EngineConfig(str(folder), **options), open_model(folder))


def rendered(model: LoadedModel) -> str:
    return model.tokenizer.decode(model.tokenizer.prompt_ids(HELLO), skip_special_tokens=False)


def test_a_model_brings_its_name_tokenizer_template_and_defaults(folder: Path) -> None:
    generation = folder / "generation_config.json"
    before = generation.read_text()
    generation.write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": [1, 2], "x": 3}')
    try:
        model = load(folder)
    finally:
        generation.write_text(before)
    assert model.name == "tiny-llama"
    assert {1, 2} <= set(model.eos_token_ids)
    assert model.generation.shown() == {"temperature": 0.5, "top_k": 7}
    assert CHAT_TEMPLATE
    assert "hello" in rendered(model)


def test_another_tokenizer_is_taken_from_a_folder_or_a_file(folder: Path, tmp_path: Path) -> None:
    own = load(folder).tokenizer
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        other = load(folder, tokenizer=str(given)).tokenizer
        assert (own.vocab_size, other.vocab_size) == (300, 256)
        assert len(other.encode("hello")) == 5
    with pytest.raises(ModelLoadError, match=r"nowhere.* is missing") as caught:
        load(folder, tokenizer=str(tmp_path / "nowhere.json"))
    assert "\n" not in str(caught.value)


def test_another_chat_template_is_a_file_or_the_text_itself(folder: Path, tmp_path: Path) -> None:
    text = "{% for message in messages %}<{{ message.role }}|{{ message.content }}>{% endfor %}"
    path = tmp_path / "template.jinja"
    path.write_text(text)
    for given in (text, str(path)):
        assert rendered(load(folder, chat_template=given)) == "<user|hello>"


@pytest.mark.parametrize(
    ("template", "said"),
    [("no-such-file.jinja", "no-such-file.jinja can't be read"), ("{% if %}", "not valid jinja2")],
)
def test_a_wrong_chat_template_is_one_line(folder: Path, template: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        load(folder, chat_template=template)
    assert "\n" not in str(caught.value)


def test_every_option_that_the_worker_has_reaches_it() -> None:
    options: dict[str, Any] = {
        "model_impl": "transformers",
        "dtype": "float16",
        "device": "cuda",
        "max_model_len": 77,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 99,
        "kv_cache_dtype": "fp8",
        "kv_cache_memory_bytes": 1 << 33,
        "process_memory_limit": 1 << 36,
        "kv_offloading_bytes": 1 << 34,
        "kv_offloading_dir": "/pages",
        "kv_offloading_dir_bytes": 1 << 35,
        "gpu_memory_utilization": 0.5,
        "num_threads": 3,
        "logprobs_mode": "processed",
        "max_logprobs": 70,
        "enforce_eager": True,
        "deterministic": True,
        "quantization": "int8",
        "max_loras": 3,
        "max_lora_rank": 24,
        "cpu_isa": "avx512_bf16",
        "tensor_parallel_size": 4,
        "tensor_parallel_slices": 8,
        "pipeline_parallel_size": 3,
        "enable_expert_parallel": True,
    }
    config = EngineConfig(
        "m",
        block_size=32,
        num_gpu_blocks_override=12,
        tokenizer="/tokenizers/t",
        logits_processors=("m:A", "m:B"),
        enable_lora=True,
        speculative_config='{"method": "ngram", "prompt_lookup_min": 3}',
        pipeline_parallel_layers="4,4,3",
        **options,
    )
    start = start_message(config, Path("/models/m"))
    assert attrs.asdict(start) == {
        **options,
        "model": "/models/m",
        "page_size": 32,
        "num_pages": 12,
        "tokenizer": "/tokenizers/t",
        "logits_processors": ["m:A", "m:B"],
        "weights": "",
        "speculative": {
            "method": "ngram",
            "num_speculative_tokens": 15,
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 5,
            "model": "",
            "quantization": "auto",
            "adaptive": True,
        },
        "cores": [],
        "rank_cores": [],
        "free_memory": 0,
        "link_timeout": 5.0,
        "pipeline_parallel_layers": [4, 4, 3],
        "num_sharing": 1,
        "has_grammars": False,
        "hands_over": False,
        "mock": None,
        "num_nodes": 1,
        "nodes_listen": "",
        "nodes_tls": None,
    }
    assert start_message(EngineConfig("m", max_lora_rank=24), Path("/m")).max_lora_rank == 0
    apart = EngineConfig("m", data_parallel_size=2, disaggregation=("auto",))
    assert start_message(apart, Path("/m")).hands_over


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps() -> list[wire.LoadingProgress]:
    weights = [wire.LoadingProgress(stage="weights", done=done, total=40) for done in (10, 20, 40)]
    return [*weights, wire.LoadingProgress(stage="warm-up", done=0, total=0)]


def test_loading_shows_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with LoadingReport() as report:
        for progress in steps():
            report(progress)
    shown = terminal.getvalue()
    assert "weights" in shown
    assert "100%" in shown
    assert "warm-up" in shown


def test_loading_logs_each_stage_once_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level("INFO", "trioserve"), LoadingReport() as report:
        for progress in steps():
            report(progress)
    assert [record.getMessage() for record in caplog.records] == [
        "loading stage='weights'",
        "loading stage='warm-up'",
    ]


def test_a_long_stage_is_logged_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    seconds = iter([0.0, 1.0, 5.0, 9.0, 10.5])
    monkeypatch.setattr(cli_loading.time, "monotonic", lambda: next(seconds))
    with caplog.at_level("INFO", "trioserve"), LoadingReport() as report:
        for done in range(5):
            report(wire.LoadingProgress(stage="kernels", done=done, total=30))
    assert [record.getMessage() for record in caplog.records] == [
        "loading stage='kernels'",
        "loading stage='kernels' done=2 total=30",
        "loading stage='kernels' done=4 total=30",
    ]
