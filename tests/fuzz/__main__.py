"""Runs one target, or all of them in turn, under atheris."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="which; all if none is named")
    parser.add_argument("--list", action="store_true", help="only name the targets")
    parser.add_argument("--seconds", type=int, default=300, help="for each target (300)")
    parser.add_argument("--seed", type=int, default=1, help="of atheris (1)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _fuzz(options.targets[0], options.seconds, options.seed, options.findings)
    from tests.fuzz.targets import TARGETS

    if options.list:
        print("\n".join(TARGETS))
        return 0
    failed = []
    for name in options.targets or TARGETS:
        # A process of its own: a finding ends it, and so does a crash of native code.
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            "--one",
            name,
            f"--seconds={options.seconds}",
        ]
        command += [f"--seed={options.seed}", f"--findings={options.findings}"]
        code = subprocess.call(command)
        if code:
            failed.append(name)
    print("findings in:", ", ".join(failed) or "none")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int, seed: int, findings: Path) -> int:
    import atheris

    with atheris.instrument_imports(include=["trioserve", "gpu"]):
        from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for index, data in enumerate(target.seeds()):
            (Path(corpus) / f"{index:04}").write_bytes(data)
        arguments = [
            "fuzz",
            corpus,
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-artifact_prefix={findings}/{name}-",
            "-timeout=20",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            "-max_len=131072",
        ]
        atheris.Setup(arguments, target.from_bytes())
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
