"""The files in docker/, held against the program: what can be checked without a container engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from mainspring import InMemoryMailbox, LoopGroup, MainLoop, open_mailbox
from mainspring.group.calibration import Timeouts
from mainspring.http.app import health_app
from mainspring.telemetry.metrics import GroupMetrics
from mainspring.telemetry.status import MailboxStatus
from servers import RedisServer

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MANIFESTS = [
    document
    for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
BOARD = json.loads((DOCKER / "grafana" / "dashboards" / "mainspring.json").read_text())


def manifest(kind: str) -> dict[str, Any]:
    (only,) = [document for document in MANIFESTS if document["kind"] == kind]
    return only


def pod() -> dict[str, Any]:
    return manifest("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


def instructions(word: str) -> list[str]:
    """What stands behind each instruction of that name, in order."""
    return re.findall(rf"^ *{word} +(.+)$", DOCKERFILE, re.MULTILINE)


def stage(name: str) -> str:
    """The lines of one stage of the Dockerfile."""
    (text,) = [part for part in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE) if f" AS {name}\n" in part]
    return text


def in_brackets(text: str, word: str) -> list[str]:
    """The words of an instruction in the exec form; a shell form is no JSON."""
    (line,) = re.findall(rf"^{word} +(.+)$", text, re.MULTILINE)
    return json.loads(line)


def some_group() -> LoopGroup:
    async def handle(job: str) -> None: ...

    return LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)])


def routes() -> set[str]:
    return {route.path for route in health_app(some_group()).routes if isinstance(route, Route)}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# ---------------------------------------------------------------------------------------------------------------- image


def test_the_image_runs_as_somebody_who_is_not_root() -> None:
    users = instructions("USER")
    assert users
    assert all(int(user.partition(":")[0]) >= 1000 for user in users)
    assert int(users[-1].partition(":")[0]) == pod()["securityContext"]["runAsUser"]


def test_what_the_image_copies_is_there_and_not_left_out() -> None:
    kept = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [word for line in instructions("COPY") if not line.startswith("--from") for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(Path(source) == Path(name) or Path(name) in Path(source).parents for name in kept), source


def test_the_extras_of_the_image_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (chosen,) = [line.removeprefix("EXTRAS=") for line in instructions("ARG") if line.startswith("EXTRAS=")]
    assert {"redis", "postgres", "nats"} <= set(chosen.split(",")) <= set(extras)


def test_the_health_check_asks_for_what_there_is() -> None:
    (check,) = instructions("HEALTHCHECK")
    path = re.search(r"http://127\.0\.0\.1:8080(/[\w/]+)", check)
    assert path is not None
    assert path[1] in routes()


def command_of_the_image() -> list[str]:
    return [*in_brackets(stage("mainspring"), "ENTRYPOINT"), *in_brackets(stage("worker"), "CMD")]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["image", "manifest"])
def test_the_command_serves_the_probes_and_ends_clean(where: str, tmp_path: Path) -> None:
    if where == "image":
        program, *arguments = command_of_the_image()
    else:
        assert "command" not in container()  # it would replace the entry point
        program, *arguments = [*in_brackets(stage("mainspring"), "ENTRYPOINT"), *container()["args"]]
    assert program == "mainspring"
    port = arguments.index("--health-port") + 1
    assert arguments[port] == "8080"
    arguments[port] = "0"
    environment = {
        **os.environ, "PYTHONPATH": str(DOCKER / "worker"), "MAILBOX_URL": f"sqlite:///{tmp_path}/jobs.db?name=jobs",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "mainspring", *arguments],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            assert worker.stderr is not None
            line = next(line for line in worker.stderr if "health server at" in line)
            url = re.search(r"http://[\d.]+:\d+", json.loads(line)["message"])
            assert url is not None
            for path in ("/health/startup", "/health/live", "/metrics"):
                with urllib.request.urlopen(url[0] + path, timeout=10) as answer:
                    assert answer.status == 200
            worker.send_signal(signal.SIGTERM)
            worker.stderr.read()
            assert worker.wait(30) == 0
        finally:
            worker.kill()


# -------------------------------------------------------------------------------------------------------------- compose


def redis_options() -> list[str]:
    program, *options = shlex.split(SERVICES["redis"]["command"])
    assert program == "redis-server"
    return options


def test_the_settings_of_redis_are_those_that_the_guarantees_need() -> None:
    options = redis_options()
    settings = dict(zip(options[::2], options[1::2], strict=True))
    assert settings == {"--appendonly": "yes", "--appendfsync": "always", "--maxmemory-policy": "noeviction"}


class AsInCompose(RedisServer):
    """A Redis server with the options of the compose file, and no others that matter."""

    def command(self) -> list[str]:
        return [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", *self.options]


@pytest.mark.parametrize(("changed", "warnings"), [((), 0), (("--appendonly", "no"), 1)])
def test_a_mailbox_has_nothing_to_warn_of(
    changed: tuple[str, ...], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def look(url: str) -> None:
        async with open_mailbox(url, name="docker", body=str) as mailbox:
            assert await mailbox.send("job")

    with AsInCompose(*redis_options(), *changed) as server:
        anyio.run(look, server.url)
    assert len([record for record in caplog.records if record.name == "mainspring.mailbox"]) == warnings


def test_the_settings_of_postgres_are_those_that_the_guarantees_need() -> None:
    settings = dict(part.split("=") for part in shlex.split(SERVICES["postgres"]["command"]) if "=" in part)
    for name in ("fsync", "full_page_writes", "synchronous_commit", "autovacuum"):
        assert settings[name] == "on"


def test_nats_keeps_its_streams_in_the_volume_and_flushes_each_write() -> None:
    text = (DOCKER / "nats" / "nats.conf").read_text()
    store = re.search(r"^ *store_dir: (\S+)$", text, re.MULTILINE)
    assert store is not None
    assert f"nats:{store[1]}" in SERVICES["nats"]["volumes"]
    assert re.search(r"^ *sync_interval: always$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["redis", "postgres", "nats"])
def test_a_server_has_a_volume_a_check_and_only_this_machine(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    named = [volume.partition(":")[0] for volume in service["volumes"] if not volume.startswith(".")]
    assert named
    assert set(named) <= set(COMPOSE["volumes"])
    assert not service.get("profiles")  # it starts without the example fleet


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_files_that_compose_mounts_are_there() -> None:
    mounted = [
        volume.partition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    ]
    assert len(mounted) == 4
    for path in mounted:
        assert (DOCKER / path).exists(), path


def test_a_worker_is_given_the_time_that_a_shutdown_takes() -> None:
    assert seconds(SERVICES["worker"]["stop_grace_period"]) >= Timeouts().needed


# ----------------------------------------------------------------------------------------------------------- Kubernetes


def test_the_manifest_waits_long_enough() -> None:
    assert pod()["terminationGracePeriodSeconds"] >= Timeouts().needed


def test_the_probes_ask_for_what_there_is() -> None:
    paths = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert len(paths) == 3
    assert paths <= routes()
    (port,) = container()["ports"]
    assert {container()[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")} == {
        port["name"]
    }
    assert manifest("Deployment")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] in routes()


def test_the_service_and_the_budget_mean_the_pods() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == labels


# ----------------------------------------------------------------------------------------------------------- monitoring


async def scrape() -> str:
    group = some_group()
    async with group:
        text, _ = GroupMetrics(group).render([MailboxStatus("jobs", {"pending": 1}, queue_age=1.0)])
    return text.decode()


def samples() -> dict[str, set[str]]:
    """The names that a scrape has, each with its labels, and those that Prometheus adds."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(anyio.run(scrape)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels, {"instance", "job"})
    return found


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_the_dashboard_asks_for_metrics_that_there_are(panel: dict[str, Any]) -> None:
    known = samples()
    assert panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"]
        names = set(re.findall(r"\b(?:mainspring|process)_\w+", expression))
        assert names, expression
        assert names <= set(known), expression
        grouped = {label for found in re.findall(r"by \(([^)]*)\)", expression) for label in found.split(", ")}
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for name in names:
            assert grouped <= known[name], expression
        assert shown <= (grouped or known[next(iter(names))]), expression


def test_the_dashboard_is_found_and_has_its_source() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert {target["datasource"]["uid"] for panel in BOARD["panels"] for target in panel["targets"]} == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "mainspring.yaml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]


def test_prometheus_scrapes_the_workers() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (look_up,) = job["dns_sd_configs"]
    assert set(look_up["names"]) <= set(SERVICES)
    assert job.get("metrics_path", "/metrics") in routes()
    command = command_of_the_image()
    assert str(look_up["port"]) == command[command.index("--health-port") + 1]
