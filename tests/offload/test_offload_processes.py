"""OffloadPool with worker processes: real ones, which die in every way that processes do."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

import offload_work
from mainspring import OffloadPool
from mainspring.errors import (
    OffloadClosedError,
    OffloadPickleError,
    OffloadTimeoutError,
    OffloadWorkerDiedError,
    Retry,
    TaskExitError,
)
from mainspring.offload import worker_main as offload_worker
from offload_support import HeldStart, ended, is_there, start_workers_by, told, unkillable, workers

pytestmark = [pytest.mark.anyio, pytest.mark.own_time(2)]


@pytest.fixture
def held_start(tmp_path, monkeypatch):
    return HeldStart(tmp_path, monkeypatch)


# -------------------------------------------------------------------------------------------------------------- results


async def test_it_is_done_in_another_process_which_is_used_again():
    async with OffloadPool("process", workers=2) as pool:
        first = await pool.run(offload_work.pid)
        assert first != os.getpid()
        assert await pool.run(offload_work.pid) == first
        assert await pool.run(offload_work.add, "a" * 1_000_000, "b") == "a" * 1_000_000 + "b"
    assert not is_there(first)


async def test_several_work_at_once(tmp_path):
    async with OffloadPool("process", workers=2) as pool, anyio.create_task_group() as tasks:
        paths = [tmp_path / "one", tmp_path / "two"]
        for path in paths:
            tasks.start_soon(pool.run, offload_work.sleep_in, str(path))
        pids = [pid for path in paths for pid in await told(path)]
        assert len(set(pids)) == 2
        tasks.cancel_scope.cancel()


async def test_an_exception_comes_with_where_it_was_raised():
    async with OffloadPool("process", workers=1) as pool:
        with pytest.raises(KeyError, match="key") as caught:
            await pool.run(offload_work.raise_it, KeyError, "key")
        (note,) = caught.value.__notes__
        assert "raise kind(*args)" in note
        assert "worker_main.py" not in note
        with pytest.raises(TaskExitError, match=r"leave raised SystemExit\(3\)"):
            await pool.run(offload_work.leave, 3)
        with pytest.raises(Retry) as retried:
            await pool.run(offload_work.raise_retry)
        assert (retried.value.delay, retried.value.charge) == (5, False)


@pytest.mark.parametrize(
    ("fn", "args", "complaint"),
    [
        (lambda: None, (), r"<lambda> cannot be offloaded to a process or an interpreter: it or an argument cannot be"),
        (print, (open,), None),
        (len, (sys,), r"len cannot be offloaded .*; give a function of a module, and plain data"),
        (len, (offload_work.Stranger(),), r"len: the function or an argument cannot be unpickled there \(LookupError"),
        (offload_work.a_lambda, (), r"a_lambda: its result of type function cannot be pickled"),
        (
            offload_work.raise_it,
            (offload_work.TwoWords, 1, 2),
            r"raise_it: it raised an exception that cannot be pickled",
        ),
        (offload_work.raise_it, (offload_work.Unpicklable,), r"cannot be pickled \(Unpicklable: with a lock in it\)"),
        (offload_work.raise_it, (offload_work.PrankError,), r"the exception it raised comes back as str"),
    ],
)
async def test_what_cannot_be_pickled_is_said_in_one_line(fn, args, complaint):
    async with OffloadPool("process", workers=1) as pool:
        if complaint is None:
            assert await pool.run(fn, *args) is None
            return
        with pytest.raises(OffloadPickleError, match=complaint) as caught:
            await pool.run(fn, *args)
        assert "\n" not in str(caught.value)
        assert await pool.run(offload_work.add, 1, 2) == 3, "the worker is as good as before"


async def test_context_variables_of_a_job_are_not_seen_by_the_next():
    async with OffloadPool("process", workers=1) as pool:
        assert [await pool.run(offload_work.exchange_tenant, name) for name in ("a", "b")] == ["none", "none"]


async def test_what_a_job_prints_does_not_disturb():
    async with OffloadPool("process", workers=1) as pool:
        assert await pool.run(offload_work.write_to_every_stream) == ""
        assert await pool.run(offload_work.add, 1, 2) == 3


# --------------------------------------------------------------------------------------------------------------- deaths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "args", "how"),
    [
        (offload_work.kill_oneself, (), "was killed by SIGKILL"),
        (offload_work.segfault, (), "was killed by SIGSEGV"),
        (offload_work.leave_at_once, (5,), "ended with status 5"),
        (offload_work.leave_at_once, (0,), "ended with status 0"),
    ],
)
async def test_a_death_fails_its_own_call_only_and_the_worker_is_replaced(fn, args, how, tmp_path):
    async with OffloadPool("process", workers=2) as pool, anyio.create_task_group() as tasks:
        results = []

        async def neighbour():
            results.append(await pool.run(offload_work.sleep, 0.3))

        tasks.start_soon(neighbour)
        with pytest.raises(OffloadWorkerDiedError, match=f"the worker process of {fn.__name__} {how}"):
            await pool.run(fn, *args)
        for _ in range(3):
            assert await pool.run(offload_work.add, 1, 2) == 3
    assert results == [None]


async def test_a_worker_that_dies_idle_is_not_noticed_by_the_next_call():
    async with OffloadPool("process", workers=1) as pool:
        first = await pool.run(offload_work.end_after, 0.05)
        await ended(first)
        assert await pool.run(offload_work.pid) != first
        second = await pool.run(offload_work.pid)
        os.kill(second, signal.SIGKILL)
        assert await pool.run(offload_work.pid) != second


async def test_a_call_that_kills_whoever_receives_it_is_given_up(tmp_path, monkeypatch):
    """As one that is too large for the memory there is: it never begins, and worker after worker would die of it."""
    program, starts = tmp_path / "greedy_worker.py", tmp_path / "starts"
    program.write_text(
        f"import os, runpy, sys\n"
        f"from multiprocessing.connection import Connection\n"
        f"open({str(starts)!r}, 'a').write(f'{{os.getpid()}} ')\n"
        f"receive = Connection.recv_bytes\n"
        f"def too_much(self, maxlength=None):\n"
        f"    data = receive(self, maxlength)\n"
        f"    if b'deadly' in data:\n"
        f"        os.kill(os.getpid(), 9)\n"
        f"    return data\n"
        f"Connection.recv_bytes = too_much\n"
        f"sys.argv = sys.argv[1:]\n"
        f"runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    start_workers_by(monkeypatch, tmp_path / "greedy", f'#!/bin/sh\nshift\nexec PYTHON -P {program} "$@"\n')
    async with OffloadPool("process", workers=1) as pool:
        with (
            anyio.fail_after(30),
            pytest.raises(OffloadWorkerDiedError, match=r"len was killed by SIGKILL as it rec.* not begun"),
        ):
            await pool.run(len, b"deadly")
        assert len(await told(starts)) == 2
        assert await pool.run(len, b"harmless") == 8


@pytest.mark.slow
@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "just_now"])
async def test_of_workers_that_died_idle_none_costs_a_call_its_try(is_seen, tmp_path):
    done = []

    async def call():
        done.append(await pool.run(offload_work.pid))

    async with OffloadPool("process", workers=3) as pool:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(pool.run, offload_work.meet, str(tmp_path), 3)
        idle = {*workers()}
        assert len(idle) == 3
        async with anyio.create_task_group() as tasks:
            if not is_seen:  # one of them is chosen, and dies before it has taken the call
                for worker in idle:
                    os.kill(worker, signal.SIGSTOP)
                tasks.start_soon(call)
                await anyio.sleep(0.1)
                assert pool.in_flight == 1
            for worker in idle:
                with suppress(
                    ProcessLookupError
                ):  # the pool ends an idle one, too, where the one it had chosen has died
                    os.kill(worker, signal.SIGKILL)
            for worker in idle:
                await ended(worker)
            if is_seen:
                tasks.start_soon(call)
        assert idle.isdisjoint(done)
        assert len({*workers()}) == 1


@pytest.mark.parametrize("fn", [offload_work.fork_and_return, offload_work.fork_and_raise, offload_work.fork_and_leave])
async def test_the_child_of_a_job_that_forks_takes_no_jobs_and_gives_no_answers(fn, tmp_path):
    path = tmp_path / "done"
    words = [str(number) for number in range(8)]
    async with OffloadPool("process", workers=1) as pool:
        assert await pool.run(fn) == "parent"
        assert [await pool.run(offload_work.note, str(path), word) for word in words] == words
    assert path.read_text().split() == words, "each was done once"


async def test_the_child_of_a_job_that_forks_ends_where_the_job_does_and_says_so(capfd):
    async with OffloadPool("process", workers=1) as pool:
        assert await pool.run(offload_work.fork_and_wait) == 1
    assert "the job forked, and its child came back from it; the child is ended" in capfd.readouterr().err


async def test_the_end_of_a_worker_is_seen_though_its_job_has_left_a_child_behind():
    async with OffloadPool("process", workers=1) as pool:
        with anyio.fail_after(30), pytest.raises(OffloadWorkerDiedError, match="answering was killed by SIGKILL"):
            await pool.run(offload_work.fork_and_die_while_answering, 90)
        assert await pool.run(offload_work.add, 1, 2) == 3


TAG = (1).to_bytes(8, "big")
"""That of a worker's first job."""


@pytest.mark.parametrize(
    "data", [b"", b"x", b"garbage, and enough of it", TAG, TAG + b"garbage", TAG + pickle.dumps(1)]
)
async def test_an_answer_that_is_none_fails_the_call_and_ends_the_worker(data):
    async with OffloadPool("process", workers=1) as pool:
        with pytest.raises(OffloadWorkerDiedError, match=r"speak_out_of_turn .*; the call may have had effects"):
            await pool.run(offload_work.speak_out_of_turn, data)
        assert not list(workers())
        assert await pool.run(offload_work.add, 1, 2) == 3


@pytest.mark.parametrize("data", [offload_worker.BEGUN, TAG + offload_worker.BEGUN, TAG + offload_worker.perform(b"")])
async def test_an_answer_to_another_call_is_not_taken_for_this_ones_and_this_one_is_not_tried_again(data, tmp_path):
    path = tmp_path / "done"
    async with OffloadPool("process", workers=1) as pool:
        broken = await pool.run(offload_work.speak_out_of_turn, data, str(tmp_path / "now"))
        (tmp_path / "now").touch()
        with anyio.fail_after(60):
            while not (tmp_path / "now.said").exists():
                await anyio.sleep(0.005)
        with pytest.raises(OffloadWorkerDiedError, match="the call may have had effects"):
            await pool.run(offload_work.note, str(path), "once")
        await ended(broken)
        assert not path.exists() or path.read_text() in ("", "once\n")  # it may be killed between opening and writing
        assert await pool.run(offload_work.add, 1, 2) == 3


async def test_at_the_timeout_the_process_is_killed_with_what_it_started_and_replaced(tmp_path):
    async with OffloadPool("process", workers=1) as pool:
        await pool.run(offload_work.pid)
        scope = anyio.CancelScope()

        async def call():
            with scope:
                await pool.run(offload_work.start_child, str(tmp_path / "pids"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            pids = await told(tmp_path / "pids")
            scope.cancel()
        assert pool.in_flight == 0
        await pool.wait_for_late()
        for pid in pids:
            await ended(pid)
        with pytest.raises(OffloadTimeoutError):
            await pool.run(offload_work.sleep, 60, timeout=0.05)
        assert await pool.run(offload_work.pid) not in pids


async def test_a_worker_whose_start_was_not_waited_for_is_kept():
    """Were it killed, calls with a timeout shorter than a start would never get anywhere."""
    async with OffloadPool("process", workers=1) as pool:
        while not list(workers()):  # a call whose thread has not begun by its timeout starts none
            with suppress(OffloadTimeoutError):
                await pool.run(offload_work.pid, timeout=0.01)
        await pool.wait_for_late()
        (worker,) = workers()
        assert await pool.run(offload_work.pid) == worker


async def test_who_must_not_go_on_while_work_does_need_not_wait_for_a_start(held_start, caplog):
    """What was cancelled before its worker was there has not begun, and never will. The worker is for the next call."""
    async with OffloadPool("process", workers=1) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run_to_the_end, offload_work.kill_oneself)
            worker = await held_start.begun()
            tasks.cancel_scope.cancel()
        assert not caplog.records, "nothing was waited for in vain"
        assert (pool.in_flight, pool.late) == (0, 1), "the start keeps its place: no second one beside it"
        held_start.let_go()
        assert await pool.run(offload_work.pid) == worker


async def test_closing_does_not_wait_for_a_start_that_nobody_waits_for(held_start):
    async with OffloadPool("process", workers=1) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, offload_work.pid)
            worker = await held_start.begun()
            tasks.cancel_scope.cancel()
        since = anyio.current_time()
    assert anyio.current_time() - since < pool.shutdown_timeout
    assert pool.late == 0
    assert not is_there(worker)


async def test_a_call_is_killed_while_no_more_files_can_be_opened():
    async with OffloadPool("process", workers=1) as pool:
        await pool.run(len, "warm")
        with no_more_files():
            with anyio.move_on_after(0.2):
                await pool.run(time.sleep, 60)
            with anyio.fail_after(30):
                await pool.wait_for_late()
        assert await pool.run(len, "again") == 5


@contextmanager
def no_more_files():
    """This process has as many as it may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_killed_process_that_does_not_end_is_not_waited_for_without_end(tmp_path, monkeypatch, caplog):
    """As one that hangs in a call of the kernel."""
    async with OffloadPool("process", workers=1, cancel_grace=0.05) as pool:
        with unkillable(monkeypatch):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.run_to_the_end, offload_work.sleep_in, str(tmp_path / "pid"))
                (worker,) = await told(tmp_path / "pid")
                tasks.cancel_scope.cancel()
            assert is_there(worker)
            assert pool.late == 1, "it keeps its place until it ends"
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith("sleep_in was killed, and has not ended 0.05 s later")
        assert said.endswith(f"(worker process {worker}); it is not waited for")
        os.killpg(worker, signal.SIGKILL)
        await pool.wait_for_late()
        assert await pool.run(offload_work.pid) != worker


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # which is so
async def test_a_worker_that_does_not_end_is_left_behind(monkeypatch, caplog):
    async with OffloadPool("process", workers=1, cancel_grace=0.05) as pool:
        worker = await pool.run(offload_work.pid)
        with (
            unkillable(monkeypatch),
            pytest.raises(OffloadWorkerDiedError, match="speak_out_of_turn answered something else"),
        ):
            await pool.run(offload_work.speak_out_of_turn, b"garbage", None, signal.SIGSTOP)
        (said,) = [record.getMessage() for record in caplog.records]
        assert said == f"worker process {worker} was killed, and has not ended 0.05 s later; it is left behind"
        assert await pool.run(offload_work.pid) != worker
    await ended(worker)
    async with OffloadPool("process", workers=1) as pool:
        await pool.run(offload_work.pid)
        assert not Path(f"/proc/{worker}").exists(), "its exit status was collected when a process was started"


async def test_the_signals_of_a_terminal_and_of_a_service_manager_are_the_owners_to_obey():
    async with OffloadPool("process", workers=1) as pool:
        for signum in (signal.SIGINT, signal.SIGTERM):
            assert await pool.run(offload_work.signal_oneself, signum) == "still here"
        worker = await pool.run(offload_work.pid)
        assert os.getsid(worker) == worker != os.getsid(0)


async def test_a_worker_that_cannot_start_is_said(monkeypatch, tmp_path):
    start_workers_by(monkeypatch, tmp_path / "python", "#!/bin/sh\nexit 2\n")
    async with OffloadPool("process", workers=1) as pool:
        with pytest.raises(OffloadWorkerDiedError, match=r"could not be started: it ended with status 2"):
            await pool.run(offload_work.pid)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    async with OffloadPool("process", workers=1) as pool:
        with pytest.raises(OffloadWorkerDiedError, match=r"could not be started:.*No such file"):
            await pool.run(offload_work.pid)


async def test_a_worker_that_hangs_as_it_starts_is_killed(monkeypatch, tmp_path):
    start_workers_by(monkeypatch, tmp_path / "python", "#!/bin/sh\nexec sleep 60\n")
    async with OffloadPool("process", workers=1, start_timeout=0.2) as pool:
        with pytest.raises(OffloadWorkerDiedError, match="it was killed by SIGKILL"):
            await pool.run(offload_work.pid)


# -------------------------------------------------------------------------------------------------------------- closing


@pytest.mark.slow
async def test_closing_waits_and_then_kills(tmp_path):
    path, results = tmp_path / "pid", []

    async def call(pool):
        try:
            await pool.run(offload_work.sleep_in, str(path))
        except OffloadClosedError as error:
            results.append(error)

    async with anyio.create_task_group() as tasks:
        async with OffloadPool("process", workers=2, shutdown_timeout=0.1) as pool:
            tasks.start_soon(call, pool)
            (busy,) = await told(path)
            idle = await pool.run(offload_work.pid)
        assert (len(results), pool.late) == (1, 0)
        assert not is_there(busy)
        assert not is_there(idle)


async def test_an_idle_worker_that_does_not_leave_is_killed():
    async with OffloadPool("process", workers=1, cancel_grace=0.4) as pool:
        worker = await pool.run(offload_work.pid)
        os.kill(worker, signal.SIGSTOP)
    assert not is_there(worker)


async def test_a_call_that_comes_to_its_worker_when_the_pool_is_closed_starts_none(monkeypatch, tmp_path):
    class Slow:
        """It takes long to be pickled."""

        def __reduce__(self):
            pickling.set()
            assert go_on.wait(30)
            return str, ()

    async def call(pool):
        with pytest.raises(OffloadClosedError):
            await pool.run(len, Slow())

    pickling, go_on = threading.Event(), threading.Event()
    text = f'#!/bin/sh\ntouch {tmp_path / "started"}\nexec PYTHON "$@"\n'
    start_workers_by(monkeypatch, tmp_path / "python", text)
    pool = OffloadPool("process", workers=1, shutdown_timeout=0, cancel_grace=0.01)
    async with anyio.create_task_group() as tasks, pool:
        tasks.start_soon(call, pool)
        while not pickling.is_set():
            await anyio.sleep(0.001)
    go_on.set()
    await pool.wait_for_late()
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_no_descriptor_and_no_process_is_left(anyio_backend):
    async def main():
        async with OffloadPool("process", workers=2) as pool:
            await pool.run(offload_work.add, 1, 2)
            with suppress(OffloadTimeoutError):
                await pool.run(offload_work.sleep, 60, timeout=0.05)
            with suppress(OffloadWorkerDiedError):
                await pool.run(offload_work.kill_oneself)

    def run():
        anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])

    run()
    before = sorted(os.listdir("/proc/self/fd"))
    run()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not list(workers())


OWNER = """
import os, signal, sys, time
from pathlib import Path
import anyio
import offload_work
from mainspring import OffloadPool

def work(path):  # of __main__
    offload_work.start_and_sleep(path)

def hold(path):
    offload_work.hold_the_interpreter(path)

async def main(fn, path, forks):
    async with OffloadPool("process", workers=1) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, fn, path)
        while not (os.path.exists(path) and Path(path).read_text()):
            await anyio.sleep(0.005)
        if forks and os.fork() == 0:  # as multiprocessing does
            signal.alarm(60)
            while os.getppid() == owner:
                time.sleep(0.005)
            time.sleep(20)
            os._exit(0)
        Path(path + ".forked").write_text("1")
        await anyio.sleep_forever()

if __name__ == "__main__":
    owner = os.getpid()
    anyio.run(main, {"work": work, "hold": hold}[sys.argv[1]], sys.argv[2], sys.argv[3] == "True")
"""


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("fn", ["work", "hold"])
async def test_the_death_of_the_owner_ends_a_busy_worker_and_what_it_has_started(fn, forks, tmp_path):
    """Also one whose job lets no other thread of it run, and though a child that the owner has forked lives on."""
    program = tmp_path / "owner.py"
    program.write_text(OWNER)
    path = {**os.environ, "PYTHONPATH": str(Path(offload_work.__file__).parent)}
    owner = subprocess.Popen([sys.executable, str(program), fn, str(tmp_path / "pid"), str(forks)], env=path)
    try:
        processes = await told(tmp_path / "pid")
        await told(tmp_path / "pid.forked")
        assert all(map(is_there, processes))
    finally:
        owner.kill()
        owner.wait()
    with anyio.fail_after(10):
        for process in processes:
            await ended(process)


async def test_what_a_job_has_started_in_sessions_of_its_own_is_killed_with_its_worker(tmp_path):
    path = tmp_path / "pids"
    async with OffloadPool("process", workers=1) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run, offload_work.start_family_and_sleep, str(path))
        processes = await told(path)
        assert len(processes) == 3
        tasks.cancel_scope.cancel()
    for process in processes:
        await ended(process)


async def test_what_a_finished_job_has_left_running_is_killed_when_the_pool_is_closed(tmp_path):
    path = tmp_path / "pids"
    async with OffloadPool("process", workers=1) as pool:
        await pool.run(offload_work.start_family, str(path))
        processes = await told(path)
        assert all(map(is_there, processes))
    for process in processes:
        await ended(process)


@pytest.mark.slow
async def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    program = tmp_path / "unguarded.py"
    program.write_text(
        textwrap.dedent(
            """
            import anyio
            from mainspring import OffloadPool

            def work(): ...

            async def main():
                async with OffloadPool("process", workers=1) as pool:
                    await pool.run(work)

            anyio.run(main)
            """
        )
    )
    done = await anyio.run_process([sys.executable, str(program)], check=False)
    assert done.returncode == 1
    last = done.stderr.decode().rstrip().rpartition("\n")[2]
    assert last.startswith("mainspring.errors.OffloadWorkerDiedError: a worker process could not be started")
    assert 'if __name__ == "__main__":' in last


# --------------------------------------------------------------------------------------------------------- virtual time


async def test_work_in_a_process_holds_the_virtual_clock(virtual_clock):
    async with OffloadPool("process", workers=1) as pool:
        assert await pool.run(offload_work.add, 1, 2, timeout=1) == 3
        assert await pool.run(offload_work.add, 1, 2, timeout=1) == 3
    assert virtual_clock.now == 0
