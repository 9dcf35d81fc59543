"""The launcher's supervisor against real child processes that hang, crash, exit and answer."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.launcher import Launcher

HERE = Path(__file__).parent
HANDLER = "launcher_handlers:obey"


@pytest.fixture(scope="module", autouse=True)
def handlers_importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        yield


@pytest.fixture(scope="module")
def shared(handlers_importable: None) -> Iterator[Launcher]:
    """One launcher for all: each test starts from whatever state the one before left."""
    with Launcher(HANDLER, ordinal=None) as launcher:
        yield launcher


def works(launcher: Launcher) -> int:
    """Run a normal job; the child's process id."""
    pid, device, text = launcher.call(b"echo hello", 20).decode().split()
    assert (device, text) == ("None", "hello")
    assert int(pid) == launcher.pid != os.getpid()
    return int(pid)


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_child_serves_many_jobs(shared: Launcher) -> None:
    assert works(shared) == works(shared)


def test_endless_job_is_killed_and_the_next_one_works(shared: Launcher) -> None:
    pid = works(shared)
    begin = time.monotonic()
    with pytest.raises(DeviceFault, match=r"no answer within 0\.5 s \(in stage timing\)") as caught:
        shared.call(b"hang", 0.5)
    assert caught.value.stage == "timeout"
    assert 0.5 <= time.monotonic() - begin < 5
    assert not alive(pid)
    assert works(shared) != pid


def test_a_job_without_progress_is_killed_early(shared: Launcher) -> None:
    works(shared)
    assert shared.call(b"steps 8", 30, stall_seconds=0.5) == b"done", "as long as it gets on, it may take its time"
    begin = time.monotonic()
    with pytest.raises(DeviceFault, match=r"no progress within 0\.5 s \(in stage timing\)") as caught:
        shared.call(b"hang", 30, stall_seconds=0.5)
    assert caught.value.stage == "timeout" and time.monotonic() - begin < 5
    works(shared)


@pytest.mark.parametrize(
    ("job", "stage", "words"),
    [
        (b"exit 5", "infra_error", ["exited with 5", "last words"]),
        (b"segfault", "launch_error", ["SIGSEGV", "string_at"]),
        (b"kill %d" % signal.SIGKILL, "infra_error", ["SIGKILL"]),
        (b"kill %d" % signal.SIGABRT, "launch_error", ["SIGABRT"]),
    ],
)
def test_death_is_named_and_the_next_job_works(shared: Launcher, job: bytes, stage: str, words: list[str]) -> None:
    with pytest.raises(DeviceFault) as caught:
        shared.call(job, 20)
    assert caught.value.stage == stage
    for word in words:
        assert word in caught.value.message
    works(shared)


def test_death_between_jobs_goes_unnoticed(shared: Launcher) -> None:
    assert shared.call(b"later 0.05", 20) == b"ok"
    pid = shared.pid
    assert pid is not None
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert works(shared) != pid


def test_faults_and_exceptions_of_the_handler_keep_the_child(shared: Launcher) -> None:
    pid = works(shared)
    with pytest.raises(DeviceFault, match="no instruction wgmma") as caught:
        shared.call(b"fault wgmma", 20)
    assert (caught.value.stage, caught.value.kernel) == ("unsupported", "kernel_1")
    with pytest.raises(DeviceFault, match="ValueError: out of cheese") as caught:
        shared.call(b"raise out of cheese", 20)
    assert caught.value.stage == "infra_error"
    assert works(shared) == pid


def test_large_jobs_and_answers(shared: Launcher) -> None:
    size = 96 << 20
    assert shared.call(b"size " + b"j" * size, 30) == str(size).encode()
    assert shared.call(b"huge %d" % size, 30) == bytes(range(256)) * (size // 256)


def test_progress_is_reported_in_order(shared: Launcher) -> None:
    stages: list[str] = []
    assert shared.call(b"stages load check timing", 20, stages.append) == b"done"
    assert stages == ["load", "check", "timing"]


def test_an_interrupted_call_leaves_no_stale_answer(shared: Launcher) -> None:
    def interrupt(stage: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared.call(b"stages load", 20, interrupt)
    works(shared)


def test_only_the_tail_of_a_long_log_is_kept(shared: Launcher) -> None:
    with pytest.raises(DeviceFault, match="exited with 3") as caught:
        shared.call(b"noise 20000", 60)
    assert 1000 < len(caught.value.message) < 2000
    assert 30_000 < len(shared.log_tail(10**6)) < 50_000


def test_calls_from_threads_are_served_in_turn(shared: Launcher) -> None:
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda n=number: answers.append(shared.call(b"size " + b"j" * n, 20)))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [str(number).encode() for number in range(8)]


def test_a_child_started_from_a_thread_outlives_it() -> None:
    with Launcher(HANDLER, ordinal=None) as launcher:
        thread = threading.Thread(target=works, args=(launcher,))
        thread.start()
        thread.join()
        pid = launcher.pid
        assert pid is not None
        assert works(launcher) == pid


def test_unknown_handler_is_an_infra_error() -> None:
    with (
        Launcher("launcher_handlers:absent", ordinal=None) as launcher,
        pytest.raises(DeviceFault, match="absent") as caught,
    ):
        launcher.call(b"", 5)
    assert caught.value.stage == "infra_error"


def test_a_missing_gpu_is_an_infra_error() -> None:
    with Launcher(HANDLER, ordinal=99) as launcher, pytest.raises(DeviceFault, match="CUDA device 99") as caught:
        launcher.call(b"echo", 5)
    assert caught.value.stage == "infra_error"


def test_slow_start_is_an_infra_error() -> None:
    with (
        Launcher(HANDLER, ordinal=None, start_seconds=0.01) as launcher,
        pytest.raises(DeviceFault, match="did not start") as caught,
    ):
        launcher.call(b"echo", 5)
    assert caught.value.stage == "infra_error"


def test_close_ends_the_child_and_its_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    launcher = Launcher(HANDLER, ordinal=None)
    pid = works(launcher)
    launcher.close()
    launcher.close()
    assert not alive(pid)
    assert launcher.pid is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_child_dies_with_a_killed_supervisor() -> None:
    """Even while its handler is busy, when it does not see its socket close."""
    script = (
        "import sys\n"
        "from mkb_env.devices.launcher import Launcher\n"
        f"launcher = Launcher({HANDLER!r}, ordinal=None)\n"
        "launcher.call(b'hang', 60, lambda stage: print(launcher.pid, flush=True))\n"
    )
    root = str(HERE.parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(HERE)])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert alive(pid)
        supervisor.kill()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
