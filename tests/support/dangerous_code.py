"""A search of Python sources for code that could run, unpickle or fetch untrusted data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["dangers_in"]

MODULES = {
    # they make objects of bytes, and run what the bytes say
    *("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("yaml", "jsonpickle", "copyreg"),
    # they run texts or modules
    *("code", "codeop", "runpy", "imp", "pty"),
    # they fetch
    *("requests", "httpx", "aiohttp", "urllib3", "urllib.request", "http.client", "ftplib"),
    *(
        "xmlrpc",
        "telnetlib",
        "smtplib",
        "fsspec",
        "boto3",
        "PIL",
        "av",
        "opentelemetry.exporter",
        "torchaudio",
        "torchvision",
    ),
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "breakpoint"),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "os.system"),
    *("os.popen", "os.execv", "os.execve", "os.posix_spawn", "os.fork", "tempfile.mktemp"),
    *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_output"),
    *("subprocess.check_call", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("trio.run_process", "trio.lowlevel.open_process", "ctypes.CDLL", "ctypes.PyDLL"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.ops.load_library"),
    *("torch.utils.cpp_extension.load", "torch.compile", "numpy.load", "numpy.fromregex"),
    *("trio.open_tcp_stream", "trio.open_ssl_over_tcp_stream", "trio.open_unix_socket"),
    *("socket.create_connection", "socket.socket", "trio.socket.socket"),
    *("huggingface_hub.snapshot_download", "huggingface_hub.hf_hub_download"),
    *("jinja2.Environment", "jinja2.Template", "jinja2.environment.Environment"),
    *("jinja2.sandbox.SandboxedEnvironment",),  # it lets a template change what it is given
}
METHODS = {"from_pretrained", "run_sync_in_worker_process", "urlopen", "urlretrieve", "connect"}
"""Names of dangerous methods, of any object."""
ARGUMENTS = {"shell": True, "trust_remote_code": True, "allow_pickle": True, "weights_only": False}


def dangers_in(source: str) -> Iterator[str]:
    """Yield the full name of every such import and call, in their order."""
    tree = ast.parse(source)
    names = dict(_imported_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in full if _is_module(name))
        elif isinstance(node, ast.Attribute | ast.Name):
            # Not calls alone: a function may be handed to what calls it.
            name = _full_name(node, names)
            if name in CALLS and (isinstance(node, ast.Attribute) or _is_global(node, name, names)):
                yield name
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node.func.attr
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in ARGUMENTS and value is ARGUMENTS[keyword.arg]:
                    yield f"{keyword.arg}={value}"


def _is_module(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in MODULES for length in range(1, len(parts) + 1))


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each imported name with its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def _is_global(node: ast.Name, name: str, names: dict[str, str]) -> bool:
    """Return whether a bare name is an imported function or a builtin, and not a new variable."""
    return isinstance(node.ctx, ast.Load) and (node.id in names or name in CALLS)
