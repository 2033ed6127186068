"""Command lines of other servers: what changes nothing is taken, everything else is explained."""

from __future__ import annotations

import re

import pytest

from trioserve.cli.equivalents import SERVERS, equivalents
from trioserve.cli.parser import build_parsers, parse
from trioserve.config import EngineConfig
from trioserve.config.options import closest, options_of
from trioserve.protocol.errors import InvalidRequest

OWN = [flag for action in build_parsers()[1]["serve"]._actions for flag in action.option_strings]
SIZES = next(each for each in options_of(EngineConfig) if each.name == "kv_cache_memory_bytes")


def refusal(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        parse(line.split())
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_all_unknown_options_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve --model-path m --mem-fraction-static 0.8 --tp-size 2 --prot 1 --nonsense x"
    assert refusal(capsys, line) == [
        "trioserve serve: 5 options are unknown",
        "  --model-path (SGLang): use the first argument",
        "  --mem-fraction-static (SGLang): use --gpu-memory-utilization: the share of everything, "
        "weights and cache and what a step needs",
        "  --tp-size (SGLang): use --tensor-parallel-size: several processes of a worker, on GPUs "
        "one each; --enable-expert-parallel",
        "  --prot; did you mean --port?",
        "  --nonsense",
        "see trioserve serve --help",
    ]


def test_an_option_of_several_servers_is_that_of_the_command_line_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for other, server in (("--async-scheduling", "vLLM"), ("--page-size", "SGLang")):
        _, *lines, _ = refusal(capsys, f"serve m {other} --trust-remote-code")
        assert lines[1].startswith(f"  --trust-remote-code ({server}): not there, with intent")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-c 4096", "-c (llama.cpp): use --max-model-len for one sequence"),
        ("-hf x/y", "-hf (llama.cpp): use the first argument, a repository's id"),
        ("--lora-paths a=b", "--lora-paths (SGLang): use --lora-modules; see"),
        ("-tp 2", "-tp (vLLM): use --tensor-parallel-size"),
        ("-pp 2", "-pp (vLLM): use --pipeline-parallel-size"),
        ("--max_model_len 99", "--max_model_len (vLLM): use --max-model-len"),
        ("--swap-space 4", "--swap-space 4 (vLLM): not there; pages"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill; see"),
        ("-fa off", "-fa off (llama.cpp): not needed"),
        (
            "--speculative-algorithm=NGRAM",
            "--speculative-algorithm NGRAM (SGLang): use --speculative-config: NGRAM is the method "
            "ngram, STANDALONE is draft_model",
        ),
        (
            "--speculative-num-draft-tokens=4",
            "--speculative-num-draft-tokens 4 (SGLang): use --speculative-config, as num_",
        ),
        (
            "--model-draft=x.gguf",
            "--model-draft x.gguf (llama.cpp): use --speculative-config, with the method draft_",
        ),
    ],
)
def test_what_does_the_same_is_told(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (told,) = refusal(capsys, f"serve m {line}")
    assert told.startswith(f"trioserve serve: unknown: {said}")


def test_options_that_change_nothing_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "serve --enable-chunked-prefill --swap-space 0 m "
        "--disable-log-requests --attention-backend FLASH_ATTN -fa on --port 7 "
        "--compilation-config.mode 3 --cudagraph-capture-sizes 1 2 4 --enable-http2"
    )
    arguments = parse(line.split())
    assert (arguments.model, arguments.port) == ("m", "7")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "trioserve serve: --enable-chunked-prefill changes nothing here: always so"
    assert len(lines) == 8
    assert all(" changes nothing here: " in each for each in lines)


def test_values_of_the_command_s_own_options_are_left_alone() -> None:
    arguments = parse(["generate", "m", "--temperature", "-1", "- a list --tp-size 2", "--seed=-3"])
    assert (arguments.prompt, arguments.seed) == ("- a list --tp-size 2", "-3")
    assert parse(["generate", "m", "--", "--tp-size"]).prompt == "--tp-size"


def test_other_commands_know_their_own_options_only(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = refusal(capsys, "top --enable-metrics")
    assert told == "trioserve top: unknown: --enable-metrics; see trioserve top --help"


@pytest.mark.parametrize(
    "flag",
    [
        *("--code-revision", "--device-ids", "--enable-dbo", "--trace-modules", "--watermark"),
        *("--attention-config", "--mamba-block-size", "--log-level-http", "--ep", "--gc"),
    ],
)
def test_what_only_sounds_alike_is_not_suggested(flag: str) -> None:
    assert closest(flag, OWN) is None


def test_slips_are_found() -> None:
    slips = {"--prot": "--port", "--max-num-seq": "--max-num-seqs", "--Host": "--host"}
    assert {slip: closest(slip, OWN) for slip in slips} == slips
    assert closest("--max_num_seqs", OWN) == "--max-num-seqs"


def test_the_tables_are_consistent() -> None:
    for row in equivalents():
        assert row.server in SERVERS
        # What is taken is told to change nothing; other values, what there is instead.
        assert not row.accepts or re.match(r"not (needed|there)", row.here), row
        for flag in row.flags:
            row.text_for(flag)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("2G", 2 << 30), ("2GiB", 2 << 30), ("512M", 512 << 20), ("64K", 64 << 10)),
        *(("2g", 2 * 10**9), ("2GB", 2 * 10**9), ("1.5MiB", 3 << 19), ("0.5G", 1 << 29)),
        *(("4096", 4096), (" 1 GiB", 1 << 30)),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert SIZES.from_text(text) == size


@pytest.mark.parametrize("text", ["2X", "G", "-1G", "1.G", "2Gi", "1e3M", "2 G B"])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(InvalidRequest, match="a number of bytes, such as 512MiB or 2G"):
        SIZES.from_text(text)
