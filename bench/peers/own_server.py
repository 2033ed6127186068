"""This project's server, of this very tree."""

from __future__ import annotations

import sys

from bench.peers.environments import KEPT
from bench.peers.gguf_files import model_file
from bench.report import own_versions
from bench.servers import MODEL, Server
from bench.setting import Setting
from trioserve.model_files import locate, open_model

__all__ = ["own_server"]


def own_server(setting: Setting) -> Server:
    """The server on the default model's GGUF file in the setting's format.

    In bf16 it computes with bfloat16 weights, in the others with the file's own blocks, which is
    what it does by default.
    """
    return Server(
        name="trioserve",
        format=setting.format,
        argv=lambda port: [
            *(sys.executable, "-m", "trioserve", "serve"),
            str(model_file(MODEL, setting.format, KEPT)),
            *("--served-model-name", MODEL, "--port", str(port), "--log-level", "warning"),
            *_options(setting),
        ],
        fields={
            "model": MODEL,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        versions=own_versions(),
    )


def _options(setting: Setting) -> list[str]:
    options = []
    if setting.format == "bf16":
        options += ["--dtype", "bfloat16", "--quantization", "none"]
    if setting.kv_tokens is not None:
        config = open_model(locate(MODEL)).config
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        options += ["--kv-cache-memory-bytes", str(setting.kv_tokens * numbers * 2)]
        options += ["--max-num-seqs", str(setting.streams)]
        options += ["--max-model-len", str(setting.context)]
    return options
