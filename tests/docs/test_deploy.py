"""The files in docs/deploy/ name options, paths and times that the server has."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.docs.test_doc_blocks import check_trioserve
from tests.docs.test_shutdown_page import told
from tests.support.doc_blocks import ROOT
from trioserve import ServerConfig
from trioserve._util.child_process import KILL_GRACE
from trioserve.cli import flags
from trioserve.config.options import options_of
from trioserve.http.api.routes import ROUTES
from trioserve.protocol.certificates import ENGINE_FILES, WORKER_FILES
from trioserve.workers.remote.agent import LEAVE_GRACE

DEPLOY = ROOT / "docs" / "deploy"
PATHS = {rule for route in ROUTES for rule in route.rules}
DEFAULTS = {option.name: option.default for option in options_of(ServerConfig)}
PORT = DEFAULTS["port"]
SERVICE_KEYS = {
    "Unit": {"Description", "After", "Wants"},
    "Install": {"WantedBy"},
    "Service": {
        *("ExecStart", "EnvironmentFile", "Environment", "LimitNOFILE", "DynamicUser"),
        *("KillMode", "TimeoutStopSec", "SuccessExitStatus", "CacheDirectory"),
        *("Restart", "RestartSec", "RestartPreventExitStatus", "CapabilityBoundingSet"),
        *("NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices"),
        *("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups"),
        *("RestrictAddressFamilies", "RestrictSUIDSGID", "LockPersonality"),
    },
}
"""Directives that systemd knows, as ``systemd-analyze verify`` confirms."""


def longest_stop() -> float:
    """Seconds from the signal to the end, with the defaults."""
    return float(DEFAULTS["shutdown_timeout"]) + told(r"and (\d+) seconds at most")


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def check_variables(names: list[str]) -> None:
    ours = {name: "x" for name in names if name.startswith("TRIOSERVE_")}
    assert not flags.unknown_variable_lines(ours)


def directives(text: str) -> dict[str, list[str]]:
    """Return the words behind each directive of nginx or Caddy, whatever block it is in."""
    text = re.sub(r"#.*", "", text)
    assert text.count("{") == text.count("}")
    found: dict[str, list[str]] = {}
    for line in re.split(r"[;\n{}]", text):
        name, *words = line.split() or [""]
        found.setdefault(name, []).extend(words)
    return found


def seconds(text: str) -> int:
    number, unit = int(text[:-1]), text[-1]
    return number * {"s": 1, "m": 60}[unit]


def test_the_service() -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(read("trioserve.service"))
    for section in parser.sections():
        assert set(parser[section]) <= SERVICE_KEYS[section]
    service = parser["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/trioserve")
    check_trioserve(words)
    assert float(service["TimeoutStopSec"]) > longest_stop()
    assert service["KillMode"] == "mixed"  # the worker's end is the server's business
    assert {"3", "143"} <= set(service["SuccessExitStatus"].split())
    assert service["RestartPreventExitStatus"] == "2"
    cache = "/var/cache/" + service["CacheDirectory"]
    assert f"XDG_CACHE_HOME={cache}" in service["Environment"].split()


def test_the_service_of_a_worker_on_another_host() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    text = read("trioserve-worker.service")
    parser.read_string(text)
    for section in parser.sections():
        assert set(parser[section]) <= SERVICE_KEYS[section] | {"LoadCredential"}
    service = parser["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/trioserve")
    check_trioserve(words)
    assert words[words.index("--tls") + 1] == "%d"
    handed_over = re.findall(r"^LoadCredential=(.*?):", text, re.MULTILINE)
    assert tuple(handed_over) == WORKER_FILES
    assert float(service["TimeoutStopSec"]) > LEAVE_GRACE + KILL_GRACE
    assert service["RestartPreventExitStatus"] == "2"


def test_the_pods_of_workers_on_other_hosts() -> None:
    pod = yaml.safe_load(read("worker.yaml"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_trioserve(container["args"])
    assert container["command"] == ["trioserve"]
    (mount,) = container["volumeMounts"]
    assert container["args"][container["args"].index("--tls") + 1] == mount["mountPath"]
    assert pod["terminationGracePeriodSeconds"] > LEAVE_GRACE + KILL_GRACE
    for side in (ENGINE_FILES, WORKER_FILES):
        assert all(f"--from-file=tls/{name}" in read("worker.yaml") for name in side)


def test_the_image() -> None:
    text = re.sub(r"^#.*\n", "", read("Containerfile"), flags=re.MULTILINE)
    lines = re.sub(r" *\\\n +", " ", text).split("\n")
    steps: dict[str, list[str]] = {}
    for line in filter(None, lines):
        name, _, rest = line.partition(" ")
        steps.setdefault(name, []).append(rest)
    known = "FROM RUN WORKDIR COPY USER ENV EXPOSE VOLUME HEALTHCHECK ENTRYPOINT CMD"
    assert set(steps) == set(known.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"python:([\d.]+)-slim", steps["FROM"][0])
    assert SpecifierSet(project["requires-python"]).contains(version + ".0")
    (package,) = re.findall(r"^MODEL_PACKAGE = \"(.*)\"", (ROOT / "noxfile.py").read_text(), re.M)
    assert f"--no-deps {package}" in " ".join(steps["RUN"])
    assert steps["USER"] != ["root"]
    check_variables([word.split("=")[0] for word in steps["ENV"][0].split()])
    assert steps["EXPOSE"] == [str(PORT)]
    assert re.findall(r"127\.0\.0\.1:(\d+)(/\w+)'", steps["HEALTHCHECK"][0]) == [
        (str(PORT), "/health")
    ]
    program, *words = [*yaml.safe_load(steps["ENTRYPOINT"][0]), *yaml.safe_load(steps["CMD"][0])]
    assert program == "trioserve"
    check_trioserve(words)


def test_the_composition() -> None:
    services: dict[str, Any] = yaml.safe_load(read("compose.yaml"))["services"]
    ours = services["trioserve"]
    build = ours["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Containerfile")
    check_trioserve(["serve", *ours["command"]])
    check_variables(list(ours["environment"]))
    assert seconds(ours["stop_grace_period"]) > longest_stop()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    (job,) = yaml.safe_load(read("prometheus.yml"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"trioserve:{PORT}"]}]
    (source,) = yaml.safe_load(read("grafana-datasource.yaml"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(read("grafana-dashboards.yaml"))["providers"]
    mounts = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


def test_nginx() -> None:
    given = directives(read("nginx.conf"))
    assert f"127.0.0.1:{PORT}" in given["server"]
    assert given["proxy_buffering"] == ["off"]
    assert given["proxy_ignore_client_abort"] == ["off"]
    assert given["proxy_next_upstream"] == ["error"]
    assert seconds(given["proxy_read_timeout"][0]) > DEFAULTS["keep_alive_interval"]
    assert seconds(given["send_timeout"][0]) == DEFAULTS["send_timeout"]
    assert given["client_max_body_size"] == [f"{DEFAULTS['max_body_size'] >> 20}m"]
    assert given["location"][0] == "/"
    assert set(given["location"][1:]) - {"="} <= PATHS


def test_caddy() -> None:
    given = directives(read("Caddyfile"))
    assert given["reverse_proxy"] == [f"127.0.0.1:{PORT}"]
    assert given["max_size"] == [f"{DEFAULTS['max_body_size'] >> 20}MiB"]
    assert given["health_uri"][0] in PATHS
    assert given["@private"][1] in PATHS
    # With it, a client that leaves doesn't end its request.
    assert "flush_interval" not in given


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_a_page_shows_the_file(path: Any) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f"<!-- file: deploy/{path.name} -->\n" in pages
