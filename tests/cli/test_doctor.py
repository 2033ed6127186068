"""Reports of doctor about machines, installations and workers, laid out by the tests."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.console
import torch

from gpu.__main__ import examine as examine_worker
from gpu.kernels import nvrtc
from trioserve.cli.doctor import (
    DoctorReport,
    Fact,
    as_json,
    as_table,
    machine_facts,
    model_facts,
    package_facts,
    requirements,
    worker_facts,
)
from trioserve.protocol.machine import KERNEL_FEATURES, PIP_INSTALL, Machine, compiler_version

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\n"
MEMINFO = "MemTotal:  8388608 kB\nMemFree: 5 kB\nMemAvailable:  4194304 kB\n"
GIB = 1 << 30


def machine(root: Path, files: Mapping[str, str]) -> Machine:
    for name, text in {"proc/cpuinfo": CPUINFO, "proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def test_a_machine_without_limits(tmp_path: Path) -> None:
    here = machine(tmp_path, {})
    assert here.cpu_name() == "Some CPU"
    assert here.cpu_features() == ["avx2", "avx512f"]
    assert here.memory() == (8 * GIB, 4 * GIB)
    assert here.cores() == len(os.sched_getaffinity(0))


def test_limits_of_control_groups_of_either_kind(tmp_path: Path) -> None:
    unified = machine(
        tmp_path / "unified",
        {
            "proc/self/cgroup": "0::/slice/inner\n",
            "sys/fs/cgroup/slice/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/slice/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{GIB}\n",
        },
    )
    assert unified.cores() == 0.5
    assert unified.memory() == (3 * GIB, 2 * GIB)
    separate = machine(
        tmp_path / "separate",
        {
            "proc/self/cgroup": "2:cpu,cpuacct:/a\n1:memory:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "25000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert separate.cores() == 0.25
    assert separate.memory() == (2 * GIB, 0)


def test_an_empty_machine_is_no_failure(tmp_path: Path) -> None:
    values = {fact.name: fact.value for fact in machine_facts(Machine(tmp_path))}
    assert values["Processor"] == "unknown"
    assert values["Instructions"] == "none that matter"
    assert values["Memory"] == "0.0 GiB available of 0.0"


def test_the_compiler_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 99.1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert compiler_version() == f"{compiler} 99.1"
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert compiler_version() is None
    monkeypatch.setattr(Machine, "cpu_features", lambda _: list(KERNEL_FEATURES["avx512"]))
    facts = {fact.name: fact for fact in machine_facts(Machine())}
    assert facts["C++ compiler"].state == "optional"
    assert "apt install g++" in facts["C++ compiler"].advice
    assert "2 to 4 times slower" in facts["C++ compiler"].advice
    assert "CPU kernels" not in facts


def test_the_instruction_set_of_the_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 99.1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    features = list(KERNEL_FEATURES["amx"])
    monkeypatch.setattr(Machine, "cpu_features", lambda _: features)
    facts = {fact.name: fact for fact in machine_facts(Machine())}
    assert facts["CPU kernels"].value == "amx"
    monkeypatch.setenv("TRIOSERVE_CPU_ISA", "avx2")
    facts = {fact.name: fact for fact in machine_facts(Machine())}
    assert facts["CPU kernels"].value == "avx2"
    monkeypatch.setenv("TRIOSERVE_CPU_ISA", "neon")
    facts = {fact.name: fact for fact in machine_facts(Machine())}
    assert facts["CPU kernels"].state == "missing"
    assert "the processor is x86-64, without neon" in facts["CPU kernels"].value
    assert examine_worker()["compiled_cpu_kernels"] == facts["CPU kernels"].value


def test_no_compiler_is_asked_for_where_it_would_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(Machine, "cpu_features", lambda _: ["avx2", "sse4_2"])
    facts = {fact.name: fact for fact in machine_facts(Machine())}
    assert facts["CPU kernels"].value == "none: the processor has no fma, f16c"
    assert not any("g++" in fact.advice for fact in facts.values())


def test_packages_are_present_too_old_or_absent() -> None:
    facts = {fact.name: fact for fact in package_facts(["attrs>=1", "trio>=9999", "not-there>=2"])}
    assert facts["attrs"].state == "ok"
    assert facts["trio"].state == "missing"
    assert facts["trio"].value.endswith("but >=9999 is needed")
    assert facts["not-there"] == Fact(
        "not-there", "not installed", "missing", f"{PIP_INSTALL} 'not-there>=2'"
    )


def test_packages_that_only_some_need(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"cupy-cuda12x": "14.0"}
    monkeypatch.setattr("trioserve.cli.doctor._version", versions.get)
    cupy, ray = package_facts([])
    assert cupy == Fact("cupy-cuda12x", "14.0")
    assert (ray.name, ray.state) == ("ray", "optional")
    assert "'.[ray]'" in ray.advice


def test_the_requirements_are_the_projects_own() -> None:
    names = [line.partition(">")[0].partition("=")[0] for line in requirements()]
    assert {"trio", "hypercorn", "torch"} <= set(names)
    assert not any(name.startswith("cupy") for name in names)


def test_the_workers_answer_is_listed() -> None:
    devices = [{"name": "X", "memory_bytes": 3 << 29}, {"name": "Y", "memory_bytes": 1 << 30}]
    answer = {
        "torch": "2.13",
        "cuda_devices": devices,
        "cupy": None,
        "fast": True,
        "kernel_targets": ["sm_80", "sm_90a"],
        "kernel_cache": {"folder": "/k", "kernels": 2, "size_bytes": 3 << 19},
    }
    facts = list(worker_facts([sys.executable, "-c", f"print({json.dumps(answer)!r})"]))
    assert [(fact.name, fact.value, fact.state) for fact in facts] == [
        ("torch", "2.13", "ok"),
        ("cuda devices", "name X, memory 1.5 GiB\nname Y, memory 1.0 GiB", "ok"),
        ("cupy", "none", "ok"),
        ("fast", "yes", "ok"),
        ("kernel targets", "sm_80, sm_90a", "ok"),
        ("kernel cache", "folder /k, kernels 2, size 1.5 MiB", "ok"),
    ]


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Make torch find GPUs of these capabilities."""
    found = [
        SimpleNamespace(name="GPU", total_memory=GIB, major=major, minor=minor)
        for major, minor in capabilities
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)


def test_the_worker_says_what_kernels_are_built_with_and_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, (9, 0), (7, 5))
    folder = tmp_path / "trioserve" / "kernels"
    folder.mkdir(parents=True)
    (folder / "some.cubin").write_bytes(bytes(10))
    report = examine_worker()
    assert report["kernel_cache"] == {"folder": str(folder), "kernels": 1, "size_bytes": 10}
    assert f"NVRTC {report['nvrtc']}" == nvrtc.compiler()
    assert {"sm_80", "sm_90a", "sm_100", "sm_120"} <= set(report["kernel_targets"])
    hopper, turing = (device["kernels_for"] for device in report["cuda_devices"])
    assert hopper == "sm_90a"
    assert turing.startswith("none: compute capability 7.5 is too old")


def test_a_worker_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise nvrtc.KernelBuildError("no compiler here")

    monkeypatch.setattr(nvrtc, "compiler", missing)
    gpus(monkeypatch, (9, 0))
    report = examine_worker()
    assert report["nvrtc"] is None
    assert report["nvrtc_error"] == "no compiler here"
    assert report["kernel_targets"] == []
    assert report["cuda_devices"][0]["kernels_for"] == "none: kernels can't be built here"


@pytest.mark.parametrize(
    ("program", "said"), [("raise SystemExit('broken')", "broken"), ("print('?')", "Expecting")]
)
def test_a_worker_that_fails_is_missing(program: str, said: str) -> None:
    (fact,) = worker_facts([sys.executable, "-c", program])
    assert fact.state == "missing"
    assert said in fact.value


def test_known_models_and_the_hubs_cache_are_listed() -> None:
    facts = {fact.name: fact for fact in model_facts()}
    assert facts["smollm2-135m"].state in ("ok", "optional")
    assert (facts["smollm2-135m"].state == "ok") == (".gguf" in facts["smollm2-135m"].value)
    assert "models in" in facts["Hub cache"].value


def test_only_what_is_needed_and_missing_makes_a_report_unhealthy() -> None:
    report = DoctorReport({"A": [Fact("x", "1")], "B": [Fact("y", "none", "optional", "get [y]")]})
    assert report.healthy
    assert json.loads(as_json(report)) == {
        "healthy": True,
        "sections": {
            "A": [{"name": "x", "value": "1", "state": "ok", "advice": ""}],
            "B": [{"name": "y", "value": "none", "state": "optional", "advice": "get [y]"}],
        },
    }
    console = rich.console.Console(file=io.StringIO(), width=40)
    console.print(as_table(report))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["A", "  x  ok        1", "B", "  y  optional  none", "               get [y]"]
    assert not DoctorReport({"A": [Fact("x", "none", "missing")]}).healthy


def test_the_worker_says_what_there_is_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Machine, "cpu_features", lambda _: list(KERNEL_FEATURES["avx512"]))
    if compiler_version() is not None:
        assert "not built yet" in examine_worker()["compiled_cpu_kernels"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "torch computes: there is no C++ compiler" in examine_worker()["compiled_cpu_kernels"]
    monkeypatch.setattr(Machine, "cpu_features", lambda _: ["avx512f"])
    said = examine_worker()["compiled_cpu_kernels"]
    assert said == "none, torch computes: the processor has no avx2, fma, f16c"
