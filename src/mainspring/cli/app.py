"""The verbs and their arguments."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mainspring import __version__
from mainspring.cli.control_verbs import control_app
from mainspring.cli.dead_verbs import dead
from mainspring.cli.schedule_verbs import schedules
from mainspring.cli.times import ago, instant, seconds
from mainspring.cli.user_errors import FAILED, WRONG_USE, UserError, flush_output, say

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="mainspring",
    help="Keeps long-running async loops going, and lets them stop.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(control_app)
app.add_typer(dead)
app.add_typer(schedules)


class Loop(StrEnum):
    """The event loops to run on."""

    AUTO = "auto"
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"
    TRIO = "trio"


_Target = Annotated[str, typer.Argument(metavar="MODULE:ATTR", help="A LoopGroup, or a function that returns one.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# typer brings its own copy of click or, in older versions, uses the installed one: found through what it exports.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def call(arguments: Sequence[str]) -> int:
    """Run one command line. Return its exit status."""
    from mainspring.errors import ConfigError, MainspringError

    if not arguments:
        app(["--help"], prog_name="mainspring", standalone_mode=False)
        return WRONG_USE
    try:
        status = app(list(arguments), prog_name="mainspring", standalone_mode=False)
    except UserError as problem:
        say(str(problem))
        return problem.status
    except _USAGE_ERROR as error:
        text = error.format_message().rstrip(".")
        say(f"{text}; see `{error.ctx.command_path if error.ctx else 'mainspring'} --help`")
        return WRONG_USE
    except (ConfigError, MainspringError) as error:
        say(str(error))
        return WRONG_USE if error.fault in {"config", "caller"} else FAILED
    except FileNotFoundError as error:
        if error.filename is not None:
            raise
        say("the working directory has been removed; change to one that exists")
        return WRONG_USE
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has gone, which is its right
        return 0
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # click's own way to leave for that
            return 0
        raise
    finally:
        flush_output()
    return status if isinstance(status, int) else 0


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mainspring {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: `mainspring run app:group --health-port 8080`")
def run(
    target: _Target,
    processes: Annotated[int, typer.Option(min=1, help="How many worker processes to run and keep running.")] = 1,
    health_port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Serve probes and metrics here; worker i of several takes PORT + i - 1."),
    ] = None,
    health_host: Annotated[
        str | None,
        typer.Option(envvar="MAINSPRING_HEALTH_HOST", help="Where to serve them: 0.0.0.0 in a container."),
    ] = None,
    reload: Annotated[bool, typer.Option("--reload", help="Start again when a source file changes.")] = False,
    max_messages_per_process: Annotated[
        int | None,
        typer.Option(
            min=1, help="Replace a worker process once it has handled this many messages, for code that leaks."
        ),
    ] = None,
    loop: Annotated[Loop, typer.Option(help="The event loop; auto is uvloop where it is installed.")] = Loop.AUTO,
    log_level: Annotated[
        str, typer.Option(envvar="MAINSPRING_LOG_LEVEL", help="DEBUG, INFO, WARNING, ERROR or CRITICAL.")
    ] = "INFO",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
) -> int:
    """Run a LoopGroup until a signal, or until all its loops have ended.

    SIGTERM and Ctrl-C shut down in order, a second one cancels the work, a third ends the process. The exit status is 0
    after a clean shutdown, 70 where work had to be cancelled, 128+n where signal n forced it, 1 where a loop crashed.
    """
    from mainspring.cli.run import RunOptions, run_target

    return run_target(
        RunOptions(
            target,
            processes=processes,
            health_port=health_port,
            health_host=health_host,
            reload=reload,
            max_messages_per_process=max_messages_per_process,
            loop=loop.value,
            log_level=log_level,
            log_json=log_json,
        )
    )


@app.command(epilog="""Example: `mainspring send 'sqlite:///jobs.db?name=emails' '{"to": "ann@example.org"}'`""")
def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="The mailbox, for example sqlite:///jobs.db?name=emails.")],
    bodies: Annotated[
        list[str] | None, typer.Argument(metavar="[BODY]...", help="Bodies, each one JSON value.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Read bodies from a file of JSON lines, or - for standard input.")
    ] = None,
    delay: Annotated[
        float,
        typer.Option(
            metavar="TIME", parser=seconds, help="Deliver them after this time: 60s, 5m, 1h or a number of seconds."
        ),
    ] = 0.0,
    at: Annotated[
        datetime | None,
        typer.Option(
            metavar="DATE", parser=instant, help="Deliver them at this date and time with a time zone (ISO 8601)."
        ),
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher is received sooner.")] = 0,
    dedup_key: Annotated[
        str | None, typer.Option(help="While a message with this key is unfinished, send no other (one body only).")
    ] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A header; may be repeated.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="Where the result is wanted: a mailbox's name or URL.")] = None,
    expires_in: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            help="Begin them within this time or not at all: 60s, 5m, 1h or a number of seconds.",
        ),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Send messages, and print their ids once they are stored.

    Nothing is sent unless every body parses. Without BODY and --file, JSON lines are read from standard input.
    """
    from mainspring.cli.send import send_bodies

    return send_bodies(
        url,
        bodies or [],
        file,
        headers=header or [],
        dedup_key=dedup_key,
        as_json=as_json,
        delay=delay,
        at=at,
        priority=priority,
        reply_to=reply_to,
        expires_in=expires_in,
    )


@app.command("call", epilog="""Example: `mainspring call app:tasks email to=ann@example.org --wait 30s`""")
def call_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODULE:ATTR] TASK [ARGUMENT]...",
            help="A Tasks (without one: that of MAINSPRING_URL), one of its tasks, and NAME=VALUE each, or one JSON object."
            " A VALUE is JSON, or else a text.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key of the call, instead of what the task says.")] = None,
    delay: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=seconds, help="Begin it after this time: 60s, 5m, 1h or a number of seconds."
        ),
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(
            metavar="DATE", parser=instant, help="Begin it at this date and time with a time zone (ISO 8601)."
        ),
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher is begun sooner.")] = None,
    unique: Annotated[
        bool | None,
        typer.Option("--unique", help="Send none while a call with its key, or its arguments, is unfinished."),
    ] = None,
    expires_in: Annotated[
        float | None, typer.Option(metavar="TIME", parser=seconds, help="Begin it within this time or not at all.")
    ] = None,
    wait: Annotated[
        float | None, typer.Option(metavar="TIME", parser=seconds, help="Wait so long for the result, and print that.")
    ] = None,
    as_json: _Json = False,
) -> int:
    """Send a call of a task, and print the id of its job once it is stored, or, with --wait, its result as JSON.

    The arguments are checked by the types of the function, as `task.send` does; nothing is sent if one does not fit. Status 1
    where the call fails, or is not done within the time of --wait; it goes on then.
    """
    from mainspring.cli.call import call_task

    return call_task(
        words or [], wait=wait, as_json=as_json, key=key, delay=delay, at=at, priority=priority, unique=unique,
        expires_in=expires_in,
    )  # fmt: skip


_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET] [ID]...",
        help="The mailbox, by its URL or as MODULE:ATTR of a Tasks, and ids. Without one: that of MAINSPRING_URL.",
    ),
]
_Mailbox = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TARGET]", help="The mailbox, by its URL or as MODULE:ATTR of a Tasks."),
]


@app.command(epilog="Example: `mainspring stats 'sqlite:///jobs.db?name=emails'`")
def stats(target: _Mailbox = None, as_json: _Json = False) -> int:
    """Show how many messages are in each place of a mailbox, how long the oldest pending message has waited, and the limits."""
    from mainspring.cli.jobs import show_stats

    return show_stats(target or [], as_json)


@app.command(epilog="Example: `mainspring workers 'sqlite:///jobs.db?name=emails'`")
def workers(target: _Mailbox = None, as_json: _Json = False) -> int:
    """List the loops of all processes that work on a mailbox, a line each. A killed loop is shown for up to a minute."""
    from mainspring.cli.workers import show_workers

    return show_workers(target or [], as_json)


@app.command(epilog="Example: `mainspring job 'sqlite:///jobs.db?name=emails' 3f2a…`")
def job(target: _Words = None, as_json: _Json = False) -> int:
    """Say where a job is: its state, attempts, dates, progress and last error. Status 1 where it is not known.

    It shows the arguments of a call that is unfinished or dead, secrets included, and the result if it is kept.
    """
    from mainspring.cli.jobs import show_job

    return show_job(target or [], as_json)


@app.command(epilog="Example: `mainspring cancel 'sqlite:///jobs.db?name=emails' 3f2a…`")
def cancel(target: _Words = None, as_json: _Json = False) -> int:
    """End jobs before they are done: waiting jobs are removed, running handlers are cancelled."""
    from mainspring.cli.jobs import cancel_jobs

    return cancel_jobs(target or [], as_json)


@app.command(epilog="Example: `mainspring run-now 'sqlite:///jobs.db?name=emails' 3f2a…`")
def run_now(target: _Words = None, as_json: _Json = False) -> int:
    """Let jobs that wait for their time begin now; dead ones are replayed."""
    from mainspring.cli.jobs import reschedule_jobs

    return reschedule_jobs(target or [], None, None, as_json, verb="run-now")


@app.command(epilog="Example: `mainspring reschedule 'sqlite:///jobs.db?name=emails' 3f2a… --in 30m`")
def reschedule(
    target: _Words = None,
    delay: Annotated[
        float | None,
        typer.Option("--in", metavar="TIME", parser=seconds, help="After this time: 60s, 5m, 1h or seconds."),
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(metavar="DATE", parser=instant, help="At this date and time with a time zone (ISO 8601)."),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Let jobs that wait begin at another time."""
    from mainspring.cli.jobs import reschedule_jobs

    return reschedule_jobs(target or [], delay, at, as_json, verb="reschedule")


_States = Annotated[
    list[str] | None,
    typer.Option("--state", metavar="STATE", help="Jobs in this state: pending, dead and so on; may be repeated."),
]
_Task = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Jobs that call this task.")]
_Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="Jobs with this key.")]
_Since = Annotated[
    datetime | None,
    typer.Option("--since", metavar="TIME", parser=ago, help="Jobs sent since: 30m, 24h, 7d ago, or a date."),
]
_OlderThan = Annotated[
    datetime | None,
    typer.Option("--older-than", metavar="TIME", parser=ago, help="Jobs sent before: 24h, 30d ago, or a date."),
]
_Search = Annotated[
    str | None,
    typer.Option(
        "--search", metavar="TEXT", help="Jobs with this text in the id, task, key, last error or body (each is read)."
    ),
]
_OneTask = Annotated[
    str | None, typer.Option("--task", metavar="NAME", help="This task alone, instead of the whole mailbox.")
]


@app.command(epilog="Example: `mainspring jobs 'sqlite:///jobs.db?name=emails' --state pending --task email`")
def jobs(
    target: _Mailbox = None,
    state: _States = None,
    task: _Task = None,
    key: _Key = None,
    since: _Since = None,
    older_than: _OlderThan = None,
    search: _Search = None,
    limit: Annotated[int, typer.Option(min=0, help="List at most this number; 0: all.")] = 100,
    after: Annotated[
        str | None,
        typer.Option(metavar="POSITION", help="Go on behind the printed end of a list, or a job's position."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> int:
    """List jobs that fit all filters, a line each: unfinished jobs, dead letters, kept results, chains."""
    from mainspring.cli.job_list import list_jobs

    filters = {"task": task, "key": key, "since": since, "older_than": older_than, "search": search}
    return list_jobs(target or [], {"state": state, **filters}, limit or None, after, as_json)


@app.command(epilog="Example: `mainspring purge 'sqlite:///jobs.db?name=emails' --task email --older-than 30d --yes`")
def purge(
    target: _Mailbox = None,
    state: _States = None,
    task: _Task = None,
    key: _Key = None,
    since: _Since = None,
    older_than: _OlderThan = None,
    search: _Search = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: _Json = False,
) -> int:
    """Drop messages of a mailbox that are delayed, pending or in flight: all, or the messages that fit all filters.

    With --state, dead letters and kept results of that state as well. Else dead letters stay.
    """
    from mainspring.cli.job_list import purge_jobs

    filters = {"task": task, "key": key, "since": since, "older_than": older_than, "search": search}
    return purge_jobs(target or [], {"state": state, **filters}, yes, as_json)


@app.command(epilog="Example: `mainspring edit 'sqlite:///jobs.db?name=emails' 3f2a… to=ann@example.org`")
def edit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] ID NAME=VALUE...",
            help="The mailbox, the id, and the arguments to replace, or a JSON object of them; of a message that calls no task,"
            " its body as JSON.",
        ),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Change the arguments of a call that waits, or the body of a message. The other arguments stay.

    They are checked where the mailbox is named as MODULE:ATTR of a Tasks. Status 1 where the job runs or has ended.
    """
    from mainspring.cli.jobs import edit_job

    return edit_job(words or [], as_json)


@app.command(epilog="Example: `mainspring pause 'sqlite:///jobs.db?name=emails' --task email`")
def pause(target: _Mailbox = None, task: _OneTask = None, as_json: _Json = False) -> int:
    """Let no worker of the fleet begin messages of a mailbox, or of a task, until `resume`. Running handlers go on."""
    from mainspring.cli.limits import set_paused

    return set_paused(target or [], task, True, as_json)


@app.command(epilog="Example: `mainspring resume 'sqlite:///jobs.db?name=emails' --task email`")
def resume(target: _Mailbox = None, task: _OneTask = None, as_json: _Json = False) -> int:
    """End a pause: waiting messages begin at once."""
    from mainspring.cli.limits import set_paused

    return set_paused(target or [], task, False, as_json)


@app.command(epilog="Example: `mainspring concurrency 'sqlite:///jobs.db?name=emails' 20 --task email`")
def concurrency(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET] N|declared", help="The mailbox, and the number; declared: as the code says."),
    ] = None,
    task: _OneTask = None,
    as_json: _Json = False,
) -> int:
    """Let at most N messages of a mailbox, or of a task, be in flight at once in the whole fleet. This overrides the code."""
    from mainspring.cli.limits import set_concurrency

    return set_concurrency(words or [], task, as_json)


@app.command(epilog="Example: `mainspring migrate postgresql://app@db.example.org/app`")
def migrate(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A postgresql:// URL; the name of a mailbox is not needed.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    as_json: _Json = False,
) -> int:
    """Make or upgrade the tables of a PostgreSQL store.

    Mailboxes do so when they are opened, unless their URL says migrate=false: then their role needs no right to change
    tables. Safe while they are in use, and while others migrate too.
    """
    from mainspring.cli.migrate import migrate_store

    return migrate_store(url, dry_run=dry_run, as_json=as_json)


@app.command(epilog="Example: `mainspring up services.yaml`")
def up(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file of services.")],
    validate: Annotated[bool, typer.Option("--validate", help="Check the file, and start nothing.")] = False,
    loop: Annotated[Loop, typer.Option(help="The event loop; auto is uvloop where it is installed.")] = Loop.AUTO,
    log_level: Annotated[
        str, typer.Option(envvar="MAINSPRING_LOG_LEVEL", help="DEBUG, INFO, WARNING, ERROR or CRITICAL.")
    ] = "INFO",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines, the output of services too.")] = False,
    health_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Serve probes, the status and the dashboard here.")
    ] = None,
    health_host: Annotated[
        str, typer.Option(envvar="MAINSPRING_HEALTH_HOST", help="Where to serve them: 0.0.0.0 in a container.")
    ] = "127.0.0.1",
    control: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|none",
            help="The socket that takes the commands of this user (`mainspring status`, `restart` and so on); default: one"
            " that they find.",
        ),
    ] = None,
) -> int:
    """Run supervised services until a signal, or until all have ended.

    SIGTERM and Ctrl-C stop them in the reverse order of their start. A second one is passed on to all of them, a third kills
    them. SIGHUP reads the file again: only what has changed restarts. The exit status is 0 after a clean stop, 70 where a
    process had to be killed or ended with a status other than 0 and 143, 128+n where signal n forced it, 1 where a core
    service could not be kept running.
    """
    from mainspring.cli.up import UpOptions, up_file

    return up_file(UpOptions(file, validate, loop.value, log_level, log_json, health_host, health_port, control))


@app.command(epilog="Example: `mainspring check app:group --grace 45 --longest 300`")
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:ATTR|FILE", help="A LoopGroup, a function that returns one, or a YAML file of services."
        ),
    ],
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            help="From SIGTERM to SIGKILL (Kubernetes: terminationGracePeriodSeconds): 45s, 2m or a number of seconds.",
        ),
    ] = None,
    longest: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=seconds, help="The longest processing of one message: 90s, 1h or seconds."),
    ] = None,
    beat_gap: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=seconds, help="The longest a handler goes without a beat; default: --longest."
        ),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Check that the timeouts of a group, or of the services of a file, fit together, and into the orchestrator's kill time.

    The exit status is 1 where a rule does not hold; the table says which value would pass.
    """
    from mainspring.cli.service_file import is_service_file

    if is_service_file(target):
        if longest is not None or beat_gap is not None:
            raise UserError("--longest and --beat-gap are for a group; of a file of services only --grace is judged")
        from mainspring.cli.check_services import check_service_file

        return check_service_file(target, grace=grace, as_json=as_json)
    from mainspring.cli.check import check_target

    return check_target(target, grace=grace, longest=longest, beat_gap=beat_gap, as_json=as_json)


@app.command(epilog="Example: `mainspring demo --keep --dir /tmp/demo`")
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Work in this directory instead of a temporary one.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the queue and the results there.")] = False,
    files: Annotated[int, typer.Option(min=1, help="Index at most this many files.")] = 2_000,
    as_json: _Json = False,
) -> int:
    """Index the Python files of this environment with two worker processes, and hurt them while they work.

    One worker is killed and replaced, one is told to stop and drains, one file is broken on purpose. The report at the
    end says what became of every file; the exit status is 1 if one is missing. It takes well under a minute.
    """
    from mainspring.cli.demo import run_demo

    return run_demo(directory, keep=keep, files=files, as_json=as_json)


@app.command(epilog="Example: `mainspring simulate app:build --seeds 100 --faults crash,signal,partition`")
def simulate(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:ATTR", help="A function build(mailbox) that returns a LoopGroup.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run, from 0.")] = 20,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this seed only, and tell what came of it.")] = None,
    duration: Annotated[
        float,
        typer.Option(
            metavar="TIME", parser=seconds, show_default="1h", help="Virtual time of work and trouble: 24h, 30m, 90s."
        ),
    ] = 3_600.0,
    workers: Annotated[int, typer.Option(min=1, help="How many worker processes.")] = 4,
    faults: Annotated[
        str | None, typer.Option(metavar="KIND,KIND", help="Only these kinds of faults (none: no one); default: all.")
    ] = None,
    times: Annotated[
        float | None,
        typer.Option(min=0, help="Multiply the rates of all faults by this; default: a day's faults in an hour."),
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(metavar="KIND=NUMBER", help="The rate of one kind; may be repeated.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="N,N", help="Of the planned faults only these (none: no one).")
    ] = None,
    per_minute: Annotated[float, typer.Option(help="Messages a worker and minute.")] = 1.0,
    body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The messages' body, read as the handler's type; default: made up."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes share the seeds.")] = 1,
    shrink: Annotated[bool, typer.Option(help="Look for a smaller case of a failure.")] = True,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the event log of the told run.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the told run.")] = None,
    as_json: _Json = False,
) -> int:
    """Run a group as a fleet in a failing world, in virtual time, and judge what becomes of every message.

    Kinds of faults, as events an hour: crash, signal, deploy, partition, store_restart, clock_jump, freeze; as
    probabilities: second_signal, slow_call, slow_handler, hanging_handler, failing_handler, swallowing_handler, poison,
    duplicate. The first seed that breaks an invariant ends the search; the exit status is then 1, and 130 after a Ctrl-C.
    What handlers print is shown of the run that is told in full: the smallest that fails, or the one of --seed.
    """
    from mainspring.cli.simulate import SimulateOptions, simulate_target

    options = SimulateOptions(
        seeds, seed, duration, workers, faults, times, tuple(rate or ()), keep, per_minute, body, jobs, shrink, log, svg,
        as_json,
    )  # fmt: skip
    return simulate_target(target, options)
