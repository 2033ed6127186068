"""No source unpickles, evaluates or fetches what a client gave; secrets and sockets are kept."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from tests.support.dangerous_code import dangers_in
from tests.support.http_stub import StubEngine, captured_logs, client_of
from tests.support.source_files import ROOT, modules_of
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.options import options_of
from trioserve.http.api.utilities.endpoint import shown_options
from trioserve.workers.socket_folder import SocketFolder

# --- the sources ---

OWN_MODULE = "a module of this project, by a name that stands in the source"
GPU_LIBRARY = "CuPy, by a name that stands in the source"
DECODER = "decodes a file of a format that is read, in a process with limits"
OWN_TOOL = "a tool of the system or of this project, whose arguments no client sets"
ALLOWED = {
    "trioserve/__init__.py importlib.import_module": OWN_MODULE,
    "trioserve/_util/moved_modules.py importlib.import_module": OWN_MODULE,
    "trioserve/http/__init__.py importlib.import_module": OWN_MODULE,
    "gpu/kernels/catalogue.py importlib.import_module": OWN_MODULE,
    "gpu/__main__.py importlib.import_module": GPU_LIBRARY,
    "gpu/loading/devices.py importlib.import_module": GPU_LIBRARY,
    "gpu/kernels/device.py importlib.import_module": GPU_LIBRARY,
    "gpu/kernels/nvrtc.py importlib.import_module": GPU_LIBRARY,
    "gpu/constraints/processors.py importlib.import_module": "--logits-processors: the operator's",
    "trioserve/cli/doctor.py subprocess.run": OWN_TOOL,
    "trioserve/protocol/machine.py subprocess.run": OWN_TOOL,
    "gpu/kernels/emulation/build.py subprocess.run": OWN_TOOL,
    "gpu/kernels/sass.py subprocess.run": OWN_TOOL,
    "gpu/kernels/emulation/__init__.py ctypes.CDLL": "kernels of this project, in its tests",
    "gpu/cpu/build.py subprocess.run": OWN_TOOL,
    "gpu/cpu/library.py ctypes.CDLL": "kernels that this project compiled",
    "gpu/loading/devices.py ctypes.CDLL": "NVIDIA's driver, to learn whether there is one",
    "trioserve/protocol/gc_tuning.py ctypes.CDLL": "the C library, to give memory back",
    "gpu/cpu/following.py ctypes.CDLL": "the C library, to end with the parent process",
    "gpu/cpu/rank_processes.py subprocess.Popen": "the other ranks of a worker",
    "gpu/models/transformers_models/tower_process.py subprocess.Popen": "a tower on a CPU",
    "gpu/cpu/following.py socket.socket": "the socket that a rank inherits from its worker",
    "gpu/models/parallel/link.py socket.socket": "the same, as a type",
    "gpu/models/parallel/pages.py socket.socket": "the same, as a type",
    "gpu/models/parallel/stage_link.py socket.socket": "the same, as a type",
    "gpu/models/parallel/nodes.py socket.socket": "the same, to another host of the operator's",
    "gpu/models/parallel/nodes.py socket.create_connection": "the host that the operator names",
    "gpu/models/parallel/group.py socket.socket": "which interface leads there; nothing is sent",
    "gpu/models/parallel/group.py connect": "the same",
    "trioserve/workers/remote/node_agent.py trio.lowlevel.open_process": "the ranks of a node",
    "gpu/constraints/grammar_trial.py ctypes.CDLL": "the C library, to measure memory",
    "trioserve/workers/process.py trio.lowlevel.open_process": "the worker",
    "trioserve/workers/ray/port.py trio.lowlevel.open_process": "the process that speaks with Ray",
    "trioserve/workers/ray/actor.py socket.socket": "which port is free for a worker's nodes",
    "trioserve/workers/remote/port.py trio.open_tcp_stream": "its own socket on 127.0.0.1",
    "trioserve/front_ends/processes/process.py trio.lowlevel.open_process": "a front end",
    "gpu/constraints/grammar_trial.py subprocess.Popen": "the process in which grammars are tried",
    "trioserve/_util/job_child.py os.fork": "the same, without loading their libraries again",
    "trioserve/_util/job_child.py socket.socket": "the socket that it inherits from the server",
    "trioserve/_util/job_processes.py trio.lowlevel.open_process": (
        "the processes in which templates are rendered and media are decoded"
    ),
    "trioserve/requests/media/images.py PIL.Image": DECODER,
    "trioserve/requests/media/images.py PIL.Image.Image": DECODER,
    "trioserve/requests/media/images.py PIL.ImageOps": DECODER,
    "trioserve/requests/media/images.py PIL.TiffImagePlugin": DECODER,
    "trioserve/requests/media/images.py PIL.WebPImagePlugin": DECODER,
    "trioserve/requests/media/phi4_images.py PIL.Image": DECODER,
    "trioserve/requests/media/processors.py PIL.Image": DECODER,
    "trioserve/requests/media/processors.py PIL.Image.Image": DECODER,
    "trioserve/requests/media/child.py av": DECODER,
    "trioserve/requests/media/videos.py av": DECODER,
    "trioserve/requests/media/videos.py PIL.Image": DECODER,
    "trioserve/requests/media/videos.py PIL.Image.Image": DECODER,
    "trioserve/requests/media/processor_loading.py from_pretrained": (
        "the operator's model, from its folder alone, without code of its own"
    ),
    "trioserve/http/server/listeners.py socket.socket": "what the server listens on",
    "trioserve/http/server/connections.py socket.socket": "the same listener, to accept from",
    "trioserve/http/server/listeners.py connect": "whether the operator's socket is in use",
    "trioserve/load/connect.py trio.open_tcp_stream": "the load generator, not the server",
    "trioserve/cli/bench.py connect": "the load generator, not the server",
    "trioserve/cli/remote.py connect": "a command that asks a server, not the server",
    "trioserve/cli/route.py connect": "the servers that the operator names",
    "trioserve/load/remote.py connect": "the client of such commands, not the server",
    "trioserve/load/client.py connect": "the load generator, not the server",
    "gpu/models/transformers_models/reading.py from_pretrained": (
        "the operator's model, from its folder alone, without code of its own"
    ),
    "gpu/models/part_reading.py from_pretrained": (
        "the operator's model, from its folder alone, without code of its own"
    ),
    "trioserve/model_files/locate.py huggingface_hub.snapshot_download": "the operator's model",
    (
        "trioserve/observability/tracing.py "
        "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter"
    ): "--otlp-traces-endpoint: the operator's",
}
"""Dangerous calls that may be there; each entry says where the argument comes from."""


def test_no_code_runs_unpickles_or_fetches_what_a_client_gave() -> None:
    found = {
        f"{path.relative_to(ROOT)} {name}"
        for package in ("trioserve", "gpu")
        for path in modules_of(package)
        for name in dangers_in(path.read_text())
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "nothing there needs this any more"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle.loads"),
        ("import yaml as y", "yaml"),
        ("import urllib.request", "urllib.request"),
        ("from urllib import request", "urllib.request"),
        ("async def f(body):\n    return eval(body)", "eval"),
        ("f = exec", "exec"),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
        ("from torch import load\nload(path)", "torch.load"),
        ("import numpy as np\nnp.load(path)", "numpy.load"),
        ("import subprocess as s\ns.run(body)", "subprocess.run"),
        ("run(body, shell=True)", "shell=True"),
        ("AutoModel.from_pretrained(name)", "from_pretrained"),
        ("load(name, trust_remote_code=True)", "trust_remote_code=True"),
        ("import trio\ntrio.open_tcp_stream(host, 80)", "trio.open_tcp_stream"),
        ("import jinja2\njinja2.Template(body)", "jinja2.Template"),
        ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
        ("import os\nos.system(body)", "os.system"),
    ],
)
def test_what_the_search_finds(source: str, name: str) -> None:
    assert name in list(dangers_in(source))


def test_what_the_search_leaves_alone() -> None:
    source = "import re\nre.compile('x')\nimport json\njson.loads(body)\nself.compile = 1\n"
    assert list(dangers_in(source)) == []


def test_there_is_no_option_that_runs_a_models_code() -> None:
    names = {option.flag for option in options_of(ServerConfig)}
    assert not any("trust" in name or "remote-code" in name for name in names)


# --- secrets and sockets ---

KEY = "sk-a-key-that-nobody-may-see"


async def test_keys_stand_in_no_answer_and_no_log() -> None:
    stub = StubEngine()
    wrong = {"Authorization": f"Bearer {KEY[:-1]}x"}
    right = {"Authorization": f"Bearer {KEY}"}
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "other", "bogus": 1}
    with captured_logs() as entries:
        client = client_of(stub, api_key=[KEY])
        texts = []
        for headers in (wrong, right, {}, {"Authorization": KEY}):
            for path in ("/v1/chat/completions", "/v1/models", "/nowhere", f"/v1/models/{KEY[:5]}"):
                response = await client.post(path, json=chat, headers=headers)
                texts.append(await response.get_data(True))
                response = await client.get(path, headers=headers)
                texts.append(await response.get_data(True))
    shown = repr((texts, entries))
    assert "unauthorized" in shown or "401" in shown
    assert KEY not in shown
    assert KEY[:-1] not in shown


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_web_page_can_send_nothing_unasked(content_type: str | None) -> None:
    """A browser's request to another site, sent without asking, has an origin and no JSON.

    A page can leave the type out, which other clients may, too.
    """
    stub = StubEngine()
    headers = {"Origin": "https://example.org"}
    if content_type is not None:
        headers["Content-Type"] = content_type
    body = b'{"prompt": "x", "max_tokens": 1}'
    response = await client_of(stub).post("/v1/completions", data=body, headers=headers)
    assert response.status_code == 415
    assert not stub.calls
    response = await client_of(stub).post("/v1/completions", data=body)
    assert response.status_code == 200


async def test_what_a_client_wrote_is_quoted_in_part() -> None:
    """A name of millions of characters costs no more to refuse than to read."""
    name = "y" * 4_000_000
    client = client_of(StubEngine())
    started = time.process_time()
    for body, quoted in (
        ({"prompt": "x", name: 1}, "yyyy…"),
        ({"prompt": "x", "model": name}, "at most 1024"),
    ):
        response = await client.post("/v1/completions", json=body)
        assert response.status_code in (400, 404)
        text = await response.get_data(True)
        assert len(text) < 8000
        assert quoted in json.loads(text)["error"]["message"]
    assert time.process_time() - started < 20


def test_keys_stand_in_no_description_of_the_options() -> None:
    config = ServerConfig(engine=EngineConfig("m"), api_key=[KEY], admin_api_key=[KEY])
    assert KEY not in repr(config)
    assert KEY not in repr(shown_options(config))


def test_only_this_user_can_reach_the_worker(tmp_path: Path) -> None:
    umask = os.umask(0)  # the most careless there is
    try:
        folder = SocketFolder.make()
    finally:
        os.umask(umask)
    try:
        mode = stat.S_IMODE(os.stat(folder.path).st_mode)
        assert mode == 0o700
        assert os.stat(folder.path).st_uid == os.getuid()
    finally:
        folder.close()
