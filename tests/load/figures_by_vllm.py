"""Compare our figures with vLLM's: ``python -m tests.load.figures_by_vllm RESULT.json``.

RESULT.json comes from ``trioserve bench --json RESULT.json --records``. ``calculate_metrics`` of
vLLM computes the figures of the same requests, in vLLM's environment (``nox -s bench_peers`` makes
it), and each is compared with ours. The exit code is 1 if one differs by more than rounding. The
peak of concurrency is left out: earlier releases of vLLM count together all that ran in any moment
of the same second.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

_PYTHON = Path(__file__).parents[2] / "bench" / ".peers" / "vllm" / "bin" / "python"
_TOLERANCE = 1e-4
"""Times in the file are rounded to a microsecond."""

_JUDGE = """
import json, sys
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics

asked = json.load(sys.stdin)
outputs = []
for record in asked["records"]:
    chunks, start = record["chunks"], record["started"]
    output = RequestFuncOutput(success=not record["error"], start_time=start)
    if output.success:
        output.output_tokens = record["completion_tokens"]
        output.prompt_len = record["prompt_tokens"]
        output.ttft = chunks[0] - start
        output.itl = [b - a for a, b in zip(chunks, chunks[1:])]
        output.latency = chunks[-1] - start
        output.generated_text = record["text"]
    outputs.append(output)
metrics, _ = calculate_metrics(
    outputs, outputs, asked["duration"], None, [50, 90, 99], asked["limits"]
)
fields = {name: getattr(metrics, name) for name in vars(metrics)}
print("\\nJUDGED " + json.dumps(fields, default=float))
"""


def differences(
    run: dict[str, Any], limits: dict[str, float], python: Path
) -> list[tuple[str, float, float]]:
    """Return each figure's name, ours, and vLLM's."""
    figures = run["figures"]
    records = [record for record in run["records"] if not record["cancelled"]]
    asked = {"records": records, "duration": figures["duration"], "limits": limits}
    done = subprocess.run(
        [str(python), "-c", _JUDGE], input=json.dumps(asked), capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("JUDGED ")]
    if not lines:
        raise SystemExit(f"vLLM's code failed:\n{done.stderr[-2000:]}")
    theirs = json.loads(lines[0].removeprefix("JUDGED "))
    names = {
        "completed": "completed",
        "requests_per_second": "request_throughput",
        "output_tokens_per_second": "output_throughput",
        "total_tokens_per_second": "total_token_throughput",
        "peak_tokens_per_second": "max_output_tokens_per_s",
        **({"good_per_second": "request_goodput"} if limits else {}),
    }
    pairs = [(ours, figures[ours], theirs[name]) for ours, name in names.items()]
    for ours, name in (("ttft", "ttft"), ("itl", "itl"), ("tpot", "tpot"), ("e2e", "e2el")):
        spread = figures[f"{ours}_ms"]
        pairs.append((f"{ours} mean", spread["mean"], theirs[f"mean_{name}_ms"]))
        for percent, value in theirs[f"percentiles_{name}_ms"]:
            pairs.append((f"{ours} p{percent:g}", spread[f"p{percent:g}"], value))
    return pairs


def main() -> int:
    """Print every figure twice; return 1 if one differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.figures_by_vllm", description=__doc__
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--python", type=Path, default=_PYTHON, help="of an environment with vLLM")
    options = parser.parse_args()
    whole = json.loads(options.result.read_text())
    goodput = (text.split(":") for text in whole["options"]["goodput"])
    limits = {name: float(limit) for name, limit in goodput}
    wrong = 0
    for run in whole["runs"]:
        print(run["label"])
        for name, ours, theirs in differences(run, limits, options.python):
            same = math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=1e-9)
            wrong += not same
            print(f"  {name:25}{ours:14.4f}{theirs:14.4f}{'' if same else '  differs'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
