"""The layers of the code: its folders from the lowest up, and what each may import."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tests.support.source_files import ROOT, modules_of, names_imported

MAY_IMPORT: Mapping[str, Mapping[str, str]] = {
    "trioserve": {
        "protocol": "",
        "model_files": "protocol",
        "_util": "protocol",
        "config": "protocol",
        "requests": "protocol _util config",
        "observability": "protocol _util config requests",
        "requests.media": "protocol _util config requests observability",
        "requests.speech": "protocol model_files requests requests.media",
        "text": "protocol model_files _util config requests observability",
        "workers": "protocol model_files _util config observability",
        "scheduler": "protocol _util config requests observability workers",
        "pooling": (
            "protocol model_files _util config requests observability text workers scheduler"
        ),
        "engine": (
            "protocol model_files _util config requests observability requests.media "
            "requests.speech text workers scheduler pooling"
        ),
        "observability.live": (
            "protocol _util config requests observability workers scheduler engine"
        ),
        "http.server": "protocol _util config observability",
        "http.api": (
            "protocol _util config requests observability requests.speech text scheduler pooling "
            "engine observability.live http.server"
        ),
        "http": "http.server http.api",
        "front_ends": (
            "protocol model_files _util config requests observability requests.media text workers "
            "scheduler "
            "pooling engine observability.live http.server http.api http"
        ),
        "testing": (
            "protocol model_files _util config requests observability text workers scheduler "
            "pooling engine"
        ),
        "load": "protocol model_files _util requests engine",
        "http.router": (
            "protocol _util config observability scheduler engine http.server http.api load"
        ),
        "cli": (
            "protocol model_files _util config requests observability workers engine "
            "observability.live http.server http.router front_ends load"
        ),
    },
    "gpu": {
        "_util": "",
        "slots": "_util",
        "sampling": "_util slots",
        "executor": "slots sampling",
        "attention": "slots executor",
        "kernels": "_util attention",
        "kernels.emulation": "_util kernels",
        "weights": "",
        "lora": "_util slots kernels weights",
        "models": "_util slots executor attention kernels weights lora",
        "constraints": "_util slots sampling",
        "runner": "slots sampling executor",
        "loading": "slots sampling executor lora constraints runner",
        "cpu.rank_processes": "models",
        "cpu": (
            "_util slots sampling executor attention weights lora models loading cpu.rank_processes"
        ),
        "cuda": (
            "_util slots sampling executor attention kernels weights lora models loading cpu "
            "cpu.rank_processes"
        ),
        "cpu.following": "_util weights models loading cpu cpu.rank_processes cuda",
        "models.encoder": "slots executor weights models runner loading",
        "models.transformers_models": (
            "_util slots sampling executor attention lora models loading cpu"
        ),
        "mock": "slots sampling executor",
        "loading.loading": (
            "slots weights constraints runner loading cpu cpu.rank_processes cuda models.encoder "
            "models models.transformers_models mock"
        ),
        "worker": "_util slots lora constraints runner loading cuda loading.loading",
        "__main__": "kernels models models.transformers_models loading cpu cpu.following worker",
    },
}
"""Imports that each folder may make in its own package, from the lowest layer up.

A folder within a folder has a line of its own where it stands in another layer.
"""
SHARED = ("trioserve.protocol", "trioserve.model_files")
"""The folders of trioserve that gpu may import."""


@attrs.frozen
class Import:
    """One import statement: the importing module and the imported one."""

    importer: str
    imported: str

    def __str__(self) -> str:
        """Return it as errors show it."""
        return f"{self.importer} imports {self.imported}"


def module_name(path: Path) -> str:
    """Return the dotted name of a source file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(source: str, importer: str, modules: Iterable[str]) -> Iterator[Import]:
    """Yield the imports of ``modules`` in a source, those under TYPE_CHECKING included."""
    known = set(modules)
    for name in names_imported(source):
        # The last part is a module or a name in one.
        imported = name if name in known else name.rpartition(".")[0]
        if imported in known:
            yield Import(importer, imported)


def all_imports() -> list[Import]:
    """Return every import of one module of the project by another, once."""
    paths = {module_name(path): path for name in MAY_IMPORT for path in modules_of(name)}
    found = {
        each: None
        for name, path in paths.items()
        for each in imports_in(path.read_text(), name, paths)
    }
    return [each for each in found if each.importer != each.imported]


def layer_of(module: str) -> str | None:
    """Return the layer that a module is in, with its package; None for a package's own module."""
    package, _, rest = module.partition(".")
    fitting = [name for name in MAY_IMPORT[package] if f"{rest}.".startswith(f"{name}.")]
    return f"{package}.{max(fitting, key=len)}" if fitting else None


def forbidden(imports: Iterable[Import]) -> Iterator[Import]:
    """Yield the imports that the table doesn't allow."""
    for each in imports:
        importer, imported = layer_of(each.importer), layer_of(each.imported)
        if importer is None or importer == imported:
            continue
        package, _, layer = importer.partition(".")
        allowed = {f"{package}.{name}" for name in MAY_IMPORT[package][layer].split()}
        if imported not in allowed | (set(SHARED) if package == "gpu" else set()):
            yield each


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """Return the groups of modules of which each imports, over others, every other one."""
    graph: dict[str, list[str]] = defaultdict(list)
    for each in imports:
        graph[each.importer].append(each.imported)
    return [sorted(group) for group in _components(graph) if len(group) > 1]


def _components(graph: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of ``graph`` (Tarjan, 1972), without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for root in list(graph):
        work = [(root, iter(graph[root]))] if root not in index else []
        if work:
            index[root] = low[root] = len(index)
            stack.append(root)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(graph.get(other, ()))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    place = stack.index(node)
                    yield stack[place:]
                    del stack[place:]
