"""``transformers serve`` with continuous batching, in an environment of its own."""

from __future__ import annotations

from bench.peers.environments import installed_versions, model_folder, python_environment
from bench.servers import Server
from bench.setting import Setting

__all__ = ["make", "transformers_server"]

_BLOCK_TOKENS = 256
_BATCH_TOKENS = 2048


def make() -> None:
    """Install it."""
    python_environment("transformers")


def transformers_server(setting: Setting) -> Server:
    """The peer on the default model in bfloat16, of which a folder is written first.

    Raises:
        ValueError: another format.
    """
    if setting.format != "bf16":
        raise ValueError("transformers is measured in bf16 alone")
    python = python_environment("transformers")
    folder = model_folder()
    # By itself it would take nine tenths of the memory, which others need.
    blocks = -(-setting.streams * setting.context // _BLOCK_TOKENS)
    return Server(
        name="transformers",
        format=setting.format,
        argv=lambda port: [
            *(str(python), "-m", "transformers.cli.transformers", "serve", str(folder)),
            *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
            *("--cb-block-size", str(_BLOCK_TOKENS), "--cb-num-blocks", str(blocks)),
            *("--cb-max-batch-tokens", str(_BATCH_TOKENS)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        # Its last event always has the usage, and nothing in its folder ends a sequence.
        fields={"temperature": 0},
        versions=installed_versions(python, "transformers", "torch"),
        env={"HF_HUB_OFFLINE": "1"},
    )
