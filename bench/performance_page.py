"""Figures of the documentation: ``python -m bench.performance_page`` writes them.

The text between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is made of
``bench/results/MACHINE/NAME.json``, with a table for each machine. ``targets``, ``missed`` and
``machine`` are of all results on the page. ``--measure MINUTES`` first measures all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import RESULTS, Verdict, markdown, verdict_table

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.1
"""Cores that may be busy with something else; with more, figures aren't to be trusted."""
PARTS: Mapping[str, Sequence[str]] = {
    "bench.front_end.sse": (),
    "bench.micro": (),
    "tests.engine.routing.decision": (),
    "bench.front_end": (),
    "bench.engine.accuracy": (),
    "bench.engine.beams": (),
    "bench.engine.embeddings": (),
    "bench.engine.experts": (),
    "bench.engine.long_prompts": (),
    "bench.engine.products": (),
}
"""The scripts of single parts, and their options."""
_PEERS = ("--compare", "llama.cpp", "--compare", "vllm")
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """Return ``page`` with each block that is in ``blocks``; the others stay as they are."""
    if missing := sorted(blocks.keys() - {match[2] for match in _BLOCK.finditer(page)}):
        raise ValueError(f"the page has no place for {', '.join(missing)}")

    def replace(match: re.Match[str]) -> str:
        text = blocks.get(match[2])
        return match[0] if text is None else f"{match[1]}\n{text.strip()}\n\n{match[4]}"

    return _BLOCK.sub(replace, page)


Results = Mapping[str, Mapping[str, Any]]
"""Results of one processor and instruction set, by name."""


def results_in(folder: Path, names: Iterable[str]) -> dict[str, Results]:
    """Return the results of ``names`` by machine: each has a folder of its own."""
    found = {}
    for own in sorted(each for each in folder.iterdir() if each.is_dir()):
        paths = {name: own / f"{name}.json" for name in names}
        results = {name: json.loads(p.read_text()) for name, p in paths.items() if p.exists()}
        if results:
            found[own.name] = results
    return found


def page_blocks(page: str, folder: Path = RESULTS) -> dict[str, str]:
    """Return the blocks of ``page`` for which ``folder`` has a result, and those about all."""
    names = [match[2] for match in _BLOCK.finditer(page)]
    machines = results_in(folder, names)
    blocks = {}
    for name in names:
        tables = {
            machine: f"{results[name]['table']}\n\nFrom `bench/results/{machine}/{name}.json`."
            for machine, results in machines.items()
            if name in results
        }
        if tables:
            blocks[name] = _by_machine(tables)
    every = {"targets": _targets, "missed": _missed, "machine": _versions}
    for name in names:
        if name in every:
            of_machines = {one: every[name](results) for one, results in machines.items()}
            blocks[name] = _by_machine(of_machines)
    return blocks


def _by_machine(texts: Mapping[str, str]) -> str:
    """Return the text of each machine below its name, which a single one doesn't need."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n\n".join(f"**{machine}**\n\n{text}" for machine, text in texts.items())


def _verdicts(results: Results) -> list[Verdict]:
    return [Verdict(**each) for one in results.values() for each in one.get("verdicts", [])]


def _targets(results: Results) -> str:
    return _warning(results.values()) + verdict_table(_verdicts(results))


def _missed(results: Results) -> str:
    missed = [verdict for verdict in _verdicts(results) if verdict.met is False]
    return verdict_table(missed) if missed else "None of those that were measured."


def _warning(results: Iterable[Mapping[str, Any]]) -> str:
    cases = {name: cores for one in results for name, cores in one.get("busy", {}).items()}
    named = "; ".join(f"{name}: {cores:.2f}" for name, cores in cases.items() if cores > QUIET)
    if not named:
        return ""
    return (
        "**The machine wasn't quiet**, and figures of these cases decide nothing. So many cores "
        f"were busy with something else: {named}.\n\n"
    )


def _versions(results: Results) -> str:
    """Return where and when each result was measured, and the versions of all servers."""
    lines, versions = [], []
    for name, result in sorted(results.items()):
        machine = result["machine"]
        about = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB"
        cores = f"{max(result['busy'].values()):.2f}" if result.get("busy") else ""
        line = [f"`{name}.json`", result["time"], about, machine["system"], cores]
        lines.append([*line, len(result.get("failures", []))])
        for server, known in result.get("servers", {}).items():
            shown = ", ".join(f"{k} {v}" for k, v in known.items() if k != "started_with")
            versions.append((server, shown))
    heads = ["result", "time", "machine", "system", "cores busy elsewhere", "failures"]
    table = markdown(["server", "versions"], list(dict.fromkeys(versions))) if versions else ""
    return f"{markdown(heads, lines)}\n\n{table}".rstrip()


PAGES = (
    *("performance", "workers", "router", "exactness", "disaggregation", "tensor-parallel"),
    *("lora", "media"),
)
README_MACHINES = {"amd-epyc.avx512_bf16": "AMD EPYC", "intel-r-xeon-r-processor.amx": "Xeon"}
"""Machines of the README's figures, and their names there; all of the first one's are shown."""


def readme_figures(results: Path = RESULTS) -> str:
    """Return the README's block, of the same results."""
    (first, name), lines = next(iter(README_MACHINES.items())), []
    folder = results / first
    leaving = table_cells(folder / "cpu_after_leave.json")
    servers = [f"{each} bf16" for each in ("trioserve", "vllm", "llama.cpp")]
    for machine, shown in README_MACHINES.items():
        rows = table_cells(results / machine / "throughput.json")
        for case in ("1 stream", "8 streams", "32 streams"):
            own = [rows[case, server] for server in servers]
            pairs = [(float(each["tokens/s"]), float(each["TTFT p50 ms"])) for each in own]
            cells = [f"{rate:,.0f} tokens/s, {first:,.0f} ms" for rate, first in pairs]
            lines.append([f"{shown}, {case}", *cells])
    burnt = [f"{leaving['', server]['CPU burnt s']} s" for server in servers]
    lines.append([f"{name}, CPU time after 16 clients left", *burnt])
    events = json.loads((folder / "sse.json").read_text())
    (ratio,) = [v["reached"] for v in events["verdicts"] if "SSE event, 256" in v["what"]]
    four_bits = table_cells(folder / "throughput_q4_1.json")["1 stream", "llama.cpp q4_1"]
    return (
        f"{markdown(['', 'trioserve', 'vLLM', 'llama.cpp'], lines)}\n\n"
        f"With the 4-bit weights of the model's own file one stream gets "
        f"{four_bits['tokens/s: trioserve / this']} times llama.cpp's tokens/s.\n"
        f"An event of a stream costs {ratio:.2f} times the CPU time that it costs under uvicorn."
    )


def table_cells(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of a result's table, by case and server."""
    lines = json.loads(path.read_text())["table"].splitlines()
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {(row[0], row[1]): dict(zip(heads, row, strict=True)) for row in rows}


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Write ``blocks`` into a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    print(f"wrote {page}")


def measure_all(minutes: float) -> list[str]:
    """Measure all tables of the page, in about so many minutes; return the scripts that failed.

    Single parts go first, because they take as long as they take.
    """
    began = time.monotonic()

    def run(*command: str) -> bool:
        print("\n" + " ".join(command), flush=True)
        arguments = [sys.executable, "-m", *command, "--save"]
        return subprocess.run(arguments, cwd=ROOT, check=False).returncode != 0

    failed = [part for part, how in PARTS.items() if run(part, *how)]
    left = max(minutes - (time.monotonic() - began) / 60, 5.0)
    if run("bench.compare", *_PEERS, "--minutes", f"{left:.1f}"):
        failed.append("bench.compare")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the pages; return 1 if a measurement failed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--measure", type=float, metavar="MINUTES")
    options = parser.parse_args(arguments)
    failed = measure_all(options.measure) if options.measure else []
    for page in (ROOT / "docs" / f"{name}.md" for name in PAGES):
        fill(page, page_blocks(page.read_text(encoding="utf-8")))
    fill(ROOT / "README.md", {"summary": readme_figures()})
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
