"""The plan of a chaotic run: the seed decides it, and it has what was asked for. And what the command makes of its words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import psutil
import pytest
from chaos_backends import BACKENDS
from chaos_plan import KEYS, Fate, Kind, Limited, faults, job
from chaos_run import full, one, short


def test_a_seed_gives_the_same_jobs_and_faults():
    one_way, again, another = full(50_000, 7), full(50_000, 7), full(50_000, 8)
    kinds = BACKENDS["redis"].kinds
    assert faults(one_way, kinds) == faults(again, kinds) != faults(another, kinds)
    assert [job(one_way, number) for number in range(99)] == [job(again, number) for number in range(99)]
    assert job(one_way, 1) != job(another, 1)


@pytest.mark.parametrize("settings", [full(100, 1), full(100_000, 1), short(1_500, 1)])
@pytest.mark.parametrize("name", BACKENDS)
def test_there_are_as_many_faults_of_each_kind_as_asked_for(settings, name):
    planned = faults(settings, BACKENDS[name].kinds)
    assert Counter(fault.kind for fault in planned) == dict.fromkeys(BACKENDS[name].kinds, settings.each)
    assert [fault.at for fault in planned] == sorted(fault.at for fault in planned)
    assert all(0 < fault.at < 1 for fault in planned)
    assert all(fault.seconds > settings.lease for fault in planned if fault.kind is Kind.FREEZE)
    stalls = [fault.seconds for fault in planned if fault.kind is Kind.STALL]
    assert all(0 < seconds < 2 * settings.call_timeout for seconds in stalls)


def test_a_file_has_no_server_to_kill():
    assert set(BACKENDS["sqlite"].kinds) == set(Kind) - {Kind.SERVER, Kind.CUT, Kind.STALL}


def test_some_jobs_outlast_a_lease_some_fail_and_some_are_rejected():
    settings = full(100_000, 3)
    jobs = [job(settings, number) for number in range(5_000)]
    fates = Counter(each.fate for each, _ in jobs)
    assert all(fates[fate] > 0 for fate in Fate)
    assert fates[Fate.DONE] > 4_500
    assert 0 < sum(each.takes > settings.lease for each, _ in jobs) < 100
    assert 0 < sum(delay > 0 for _, delay in jobs) < 500


def test_quick_jobs_come_in_bursts_and_half_of_the_workers_can_claim_them_ahead():
    settings = full(100_000, 3)
    jobs = [job(settings, number)[0] for number in range(4 * settings.burst)]
    for each in jobs:
        assert each.quick == (each.task is None and each.number // settings.burst % 2 == 1)
    handlers = [settings.handlers(slot) for slot in range(settings.workers)]
    assert sorted(handlers) == [1, 1, settings.concurrency, settings.concurrency]


def test_a_quarter_of_the_jobs_are_calls_and_each_key_is_of_one_sender():
    settings = full(100_000, 3)
    jobs = [job(settings, number) for number in range(4_000)]
    tasks = Counter(each.task for each, _ in jobs)
    assert tasks == {None: 3_000, **dict.fromkeys(Limited, 250)}
    keys = {(each.task, each.key): each.number % settings.senders for each, _ in jobs if each.task}
    assert all(keys[each.task, each.key] == each.number % settings.senders for each, _ in jobs if each.task)
    assert Counter(task for task, _ in keys)[Limited.ORDER] == KEYS * settings.senders
    assert not any(delay for each, delay in jobs if each.task is Limited.ORDER)


def test_a_server_that_is_not_installed_is_told_by_name(tmp_path):
    def missing():
        pytest.skip("no Redis server can be started here")

    backend = replace(BACKENDS["redis"], server=missing)
    with pytest.raises(pytest.skip.Exception, match="no Redis server"):
        anyio.run(partial(one, backend, short(100, 1), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backends", "nosuch"], "no backend is named nosuch; there are sqlite, redis, postgres, nats"),
        (["--messages", "9"], "--messages must be at least 100"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(words, said):
    command = [sys.executable, str(Path(__file__).parent), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert said in ran.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_nothing_running(number, tmp_path):
    """Its workers and senders, which lead sessions of their own, and their guardians."""
    mark = f"ended-by-{number}-{tmp_path.name}"
    command = [sys.executable, str(Path(__file__).parent), "--short", "--backends", "sqlite"]
    run = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(tmp_path), "CHAOS_TEST": mark}, stderr=subprocess.PIPE, text=True
    )

    def there():
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("CHAOS_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    try:
        until = time.monotonic() + 60
        while not any('"begun"' in path.read_text() for path in tmp_path.glob("*/worker-*.jsonl")):
            assert time.monotonic() < until
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.1)
        assert len(there()) > 4
        run.send_signal(number)
        run.communicate(timeout=60)
        until = time.monotonic() + 30
        while there():
            assert time.monotonic() < until, there()
            time.sleep(0.1)
    finally:
        for process in there():
            process.kill()
        run.communicate()
