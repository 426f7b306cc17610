"""``mainspring up FILE``: the services of a file, kept running until a signal."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import typer

from mainspring.cli.control_socket import control_for
from mainspring.cli.early_signals import CommandSignals
from mainspring.cli.line_writer import LineWriter
from mainspring.cli.run import event_loop
from mainspring.cli.service_file import read_service_file
from mainspring.cli.service_output import ServiceLines
from mainspring.cli.user_errors import UserError
from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, MainspringError
from mainspring.events import ServiceOutput
from mainspring.runtime.scope import DaemonScope
from mainspring.services.config import read_config
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spawner import ProcessSpawner
from mainspring.telemetry import logs
from mainspring.threads.own_thread import OwnThread
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.services.config import OrchestratorConfig
    from mainspring.services.report import OrchestratorReport
    from mainspring.services.spec import ServiceSpec

_log = Logger("mainspring.service")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line says. ``loop``: auto, asyncio, uvloop or trio."""

    file: str
    validate: bool = False
    loop: str = "auto"
    log_level: str = "INFO"
    log_json: bool = False
    health_host: str = "127.0.0.1"
    health_port: int | None = None
    control: str | None = None


def up_file(options: UpOptions) -> int:
    """Run until a signal, or until all services have ended. Return the exit status of the process."""
    CommandSignals.install()
    config = read_service_file(options.file)
    if options.validate:
        typer.echo(f"{options.file}: {_described(config)}")
        return 0
    backend, backend_options = event_loop(options.loop)
    os.environ.setdefault("MAINSPRING_ENV", "production")
    os.environ["MAINSPRING_LOG_LEVEL"] = options.log_level
    writer = LineWriter()
    logs.configure(options.log_level, json=options.log_json, stream=writer.stream(2))
    try:
        report: OrchestratorReport = anyio.run(
            partial(_run, options, config, writer), backend=backend, backend_options=backend_options
        )
    except ConfigError as error:
        raise UserError(str(error)) from None
    finally:
        writer.close()
    return report.exit_status


def _described(config: OrchestratorConfig) -> str:
    names = [
        spec.name if spec.replicas == 1 else f"{spec.name} ({counted(spec.replicas, 'replica')})"
        for spec in config.services
    ]
    return f"{counted(len(names), 'service')}: {', '.join(names)}"


async def _run(options: UpOptions, config: OrchestratorConfig, writer: LineWriter) -> OrchestratorReport:
    name = Path(options.file).stem
    orchestrator = Orchestrator(
        config.services,
        name=name,
        strategy=config.strategy,
        max_restarts=config.max_restarts,
        period=config.period,
        shutdown=config.shutdown,
        spawner=ProcessSpawner(only_children=True),
        alerts=config.alerts,
        health_host=options.health_host,
        health_port=options.health_port,
        control=control_for(name, options.control, _log.warning),
    )
    coloured = frozenset(each for each in (1, 2) if os.isatty(each) and "NO_COLOR" not in os.environ)
    lines = ServiceLines(writer, as_json=options.log_json, coloured=coloured)
    orchestrator.dispatcher.subscribe(ServiceOutput, lines)
    logs.subscribe(orchestrator.dispatcher)
    async with DaemonScope("supervisor") as scope:
        await scope.start(_reload_on_hangup, orchestrator, options.file, config, name="reload")
        report = await orchestrator.run()
        scope.cancel()
    _log.log(logging.INFO if report.clean else logging.ERROR, "%s", report)
    return report


async def _reload_on_hangup(
    orchestrator: Orchestrator, path: str, config: OrchestratorConfig, *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    """Read the file again at each SIGHUP. A file with faults changes nothing."""

    async def read() -> Sequence[ServiceSpec]:
        new = await OwnThread(partial(read_config, path), f"read {path}").wait()  # a file of a network may hang
        if replace(new, services=config.services) != config:
            _log.warning("%s: only changes of services take effect without a restart of the supervisor", path)
        _log.info("%s was read again: %s", path, _described(new))
        return new.services

    with anyio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                await orchestrator.reload(read)
            except MainspringError as error:
                for line in str(error).splitlines():
                    _log.error("reload failed: %s", line)
            else:
                _log.info("%s is in force", path)
