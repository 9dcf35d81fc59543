"""Background servers: real processes, real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkb_env.servers import client as client_module
from mkb_env.servers.client import ServerClient, ServerError, stop, stop_all
from mkb_env.servers.wire import Header, runtime_folder, send_header, short_address


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "rt"
    monkeypatch.setenv("MKB_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield folder
    stop_all()


@pytest.fixture(params=["forking", "serial"])
def server(request: pytest.FixtureRequest, runtime: Path) -> ServerClient:
    return ServerClient("services", rooms=("servers",), kind=request.param)


@pytest.fixture
def forking(runtime: Path) -> ServerClient:
    return ServerClient("services", rooms=("servers",))


def test_first_use_starts_it_and_later_ones_find_it(server: ServerClient) -> None:
    stages: list[str] = []
    first = server.call(b"hello", seconds=10, on_progress=stages.append)
    second = server.call(b"hello", seconds=10)
    assert stages == ["hello"] and first.stage == "hello" and first.ended.exit_code == 0
    assert first.result is not None and second.result is not None
    assert first.result.split()[1] == second.result.split()[1], "the same server answered both"


def test_large_answers(server: ServerClient) -> None:
    assert server.call(b"size 30000000", seconds=20).result == bytes(30_000_000)


def test_each_job_has_its_own_process(forking: ServerClient) -> None:
    pids = {(forking.call(b"hello", seconds=10).result or b"").split()[2] for _ in range(3)}
    assert len(pids) == 3


@pytest.mark.parametrize(
    ("job", "code", "number"), [(b"exit 3", 3, None), (b"signal 11", None, 11), (b"raise no", 70, None)]
)
def test_how_a_job_ended(forking: ServerClient, job: bytes, code: int | None, number: int | None) -> None:
    outcome = forking.call(job, seconds=10)
    assert outcome.result is None and (outcome.ended.exit_code, outcome.ended.signal) == (code, number)
    assert forking.call(b"hello", seconds=10).result is not None


def test_deadline_counts_from_the_start_of_the_job(forking: ServerClient) -> None:
    started = time.monotonic()
    outcome = forking.call(b"sleep 60", seconds=0.5)
    assert outcome.ended.timed_out and outcome.stage == "sleep" and time.monotonic() - started < 20


def test_jobs_run_side_by_side(forking: ServerClient) -> None:
    forking.call(b"hello", seconds=10)
    started = time.monotonic()
    threads = [threading.Thread(target=forking.call, args=(b"sleep 3",), kwargs={"seconds": 10}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 5.8


def test_a_client_that_dies_takes_its_job_along(forking: ServerClient) -> None:
    forking.call(b"hello", seconds=10)
    code = (
        "from mkb_env.servers.client import ServerClient\n"
        "ServerClient('services', ('servers',)).call(b'sleep 60', seconds=90)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd="/")
    time.sleep(1.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # both of two places are free again: two sleepers still run side by side
    test_jobs_run_side_by_side(forking)


def test_keys_stay_outside(forking: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    names = (forking.call(b"environ", seconds=10).result or b"").decode()
    assert "PATH" in names and "OPENAI_API_KEY" not in names


def test_garbage_does_not_harm(forking: ServerClient) -> None:
    forking.call(b"hello", seconds=10)
    for data in (b"", b"\xff" * 100, b"\x04\x00\x00\x00\x01\x02\x03\x04"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            with short_address(forking.socket_path) as address:
                connection.connect(address)
            connection.sendall(data)
    assert forking.call(b"hello", seconds=10).result is not None


def test_stop_and_start_again(server: ServerClient) -> None:
    first = server.call(b"hello", seconds=10).result or b""
    assert server.running() and stop(server.socket_path)
    deadline = time.monotonic() + 10
    while server.socket_path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.running()
    second = server.call(b"hello", seconds=10).result or b""
    assert first.split()[1] != second.split()[1]


def test_changed_code_gets_a_new_server_and_ends_the_old(
    forking: ServerClient, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = forking.call(b"hello", seconds=10).result or b""
    monkeypatch.setattr(client_module, "code_fingerprint", lambda rooms: "0123456789abcdef")
    second = forking.call(b"hello", seconds=10).result or b""
    assert first.split()[1] != second.split()[1]
    deadline = time.monotonic() + 10
    while len(list(runtime.glob("*.sock"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [path.name for path in runtime.glob("*.sock")] == [forking.socket_path.name]


def test_idle_server_ends(server: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKB_IDLE_SECONDS", "0.3")
    server.call(b"hello", seconds=10)
    deadline = time.monotonic() + 15
    while server.socket_path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.running()
    assert server.call(b"hello", seconds=10).result is not None


def test_a_service_that_cannot_start_is_named(runtime: Path) -> None:
    with pytest.raises(ServerError, match=r"(?s)no_such_service.*ModuleNotFoundError"):
        ServerClient("no_such_service", rooms=("servers",)).call(b"", seconds=5)


def test_open_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)
    monkeypatch.setenv("MKB_RUNTIME_DIR", str(folder))
    with pytest.raises(PermissionError, match="mode 0700"):
        runtime_folder()


def test_without_the_token_nothing_is_done(server: ServerClient) -> None:
    """A confined submission can connect to a socket that has a path, but cannot read the token beside it."""
    server.call(b"hello", seconds=10)
    for header in (Header(5, token="guess"), Header(0, stop=True, token="guess"), Header(0, stop=True)):
        ours, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control, ours, theirs:
            with short_address(server.socket_path) as address:
                control.connect(address)
            send_header(control, header, None if header.stop else theirs)
            assert control.recv(1) == b"", "the server hangs up"
    assert server.running() and server.call(b"hello", seconds=10).result is not None


def occupy(server: ServerClient, seconds: float) -> list[threading.Thread]:
    """Keep every worker of a server busy."""
    jobs = max(2, os.cpu_count() or 1) if server.kind == "forking" else 1
    threads = [
        threading.Thread(target=server.call, args=(f"sleep {seconds}".encode(),), kwargs={"seconds": 20})
        for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    return threads


def test_the_smallest_priority_goes_first(server: ServerClient) -> None:
    server.call(b"hello", seconds=10)
    busy = occupy(server, 1.2)
    order: list[str] = []

    def ask(name: str, priority: int) -> None:
        server.call(b"sleep 0.3", seconds=20, priority=priority)
        order.append(name)

    waiting = []
    for name, priority in (("bulk 1", 10), ("bulk 2", 10), ("bulk 3", 10), ("episode 1", 0), ("episode 2", 0)):
        waiting.append(threading.Thread(target=ask, args=(name, priority)))
        waiting[-1].start()
        time.sleep(0.05)
    for thread in (*busy, *waiting):
        thread.join()
    assert set(order[:2]) == {"episode 1", "episode 2"}


def test_a_client_that_left_the_queue_is_skipped(server: ServerClient, tmp_path: Path) -> None:
    server.call(b"hello", seconds=10)
    busy = occupy(server, 1.0)
    mark = tmp_path / "ran"
    code = (
        "from mkb_env.servers.client import ServerClient; "
        f"ServerClient('services', rooms=('servers',), kind={server.kind!r}).call(b'touch {mark}', seconds=20)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    time.sleep(0.5)
    client.kill()
    client.wait()
    for thread in busy:
        thread.join()
    assert server.call(b"hello", seconds=10).result is not None
    assert not mark.exists()


def test_a_waiting_client_that_stays_is_served(server: ServerClient, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    assert server.call(f"touch {mark}".encode(), seconds=20).result is not None
    assert mark.exists()


def test_all_who_come_first_read_one_token(runtime: Path) -> None:
    code = "from mkb_env.servers.wire import token; print(token())"
    for _ in range(3):
        clients = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(6)]
        tokens = {client.communicate()[0] for client in clients}
        assert len(tokens) == 1 and len(tokens.pop().strip()) == 64
        (runtime / "token").unlink()
        assert not list(runtime.glob("token*"))
