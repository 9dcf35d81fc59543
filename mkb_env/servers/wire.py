"""Frames and handshakes between a client and a server.

A client opens a *control* connection and sends one header frame together with one end of a socket pair, the *data*
socket. The job's payload, progress and result travel on the data socket, which only the process that does the job
reads and writes; how that process ended travels on the control connection, which it does not have. So a job that runs
untrusted code can send a wrong result, but cannot forge how it ended, and the server never holds the payload.
"""

from __future__ import annotations

import array
import hashlib
import os
import secrets
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

MAX_FRAME = 320 << 20
"""Bytes; a recording holds plans of at most 256 MiB."""


class Header(msgspec.Struct, frozen=True):
    """What the server needs to know about a job."""

    seconds: float
    """Wall clock from the start of the job to its end, after which it is killed."""
    memory_bytes: int = 0
    """Private memory the job may add, 0 for no limit."""
    priority: int = 0
    """Which waiting jobs go first: those with the smallest number."""
    stop: bool = False
    """Ask the server to end instead."""
    token: str = ""
    """Proof that the client may read the runtime folder, which a confined job may not (it may connect, though: no
    sandbox used here keeps a process from a socket that has a path)."""


class Ended(msgspec.Struct, frozen=True):
    """How a job's process ended, told by the server."""

    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    sandbox: tuple[str, ...] = ()
    detail: str = ""


class Message(msgspec.Struct, frozen=True):
    """A frame on the data socket: progress (a stage's name) or, last, the result."""

    progress: str = ""
    result: bytes | None = None


class ConnectionEnded(EOFError):
    """The other side closed the socket in the middle of, or before, a frame."""


def send_frame(connection: socket.socket, record: Any) -> None:
    """Send ``record`` as one length-prefixed msgpack frame."""
    data = msgspec.msgpack.encode(record)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive_frame(connection: socket.socket, kind: type) -> Any:
    """Receive one frame as ``kind``.

    Raises:
        ConnectionEnded: at the end of the stream.
        msgspec.ValidationError, ValueError: if the bytes are not such a record or are too many.
    """
    size = int.from_bytes(_receive_exactly(connection, 4), "little")
    if size > MAX_FRAME:
        raise ValueError(f"a frame holds at most {MAX_FRAME} bytes, got {size}")
    return msgspec.msgpack.decode(_receive_exactly(connection, size), type=kind)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            raise ConnectionEnded("connection closed")
        parts += part
    return bytes(parts)


def send_header(control: socket.socket, header: Header, data: socket.socket | None) -> None:
    """Send the job's header and the server's end of the data socket."""
    frame = msgspec.msgpack.encode(header)
    rights = [] if data is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [data.fileno()]))]
    control.sendmsg([len(frame).to_bytes(4, "little") + frame], rights)


def receive_header(control: socket.socket) -> tuple[Header, socket.socket | None]:
    """Inverse of :func:`send_header`; the data socket is None in a stop request."""
    first, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(4))
    if not first:
        raise ConnectionEnded("connection closed")
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % 4])
    header = msgspec.msgpack.decode(first[4:], type=Header)
    return header, socket.socket(fileno=descriptors[0]) if descriptors else None


def token() -> str:
    """The secret of this user's runtime folder; made on first use."""
    path = runtime_folder() / "token"
    if not path.exists():
        # Written first, then named: a client and a server that both come first must read the same, whole token.
        draft = path.with_name(f"token.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_text()


def token_digest(text: str) -> bytes:
    """What a server keeps of the token: its children inherit its memory."""
    return hashlib.sha256(text.encode()).digest()


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address of at most 107 bytes, as sockets need, for a path of any length."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def runtime_folder() -> Path:
    """The private folder of this user's server sockets and logs (``MKB_RUNTIME_DIR`` overrides it).

    Raises:
        PermissionError: if the folder belongs to someone else or others may enter it.
    """
    chosen = os.environ.get("MKB_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(chosen) if chosen else Path(base or tempfile.gettempdir()) / f"mkb-env-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{folder} must belong to user {os.getuid()} with mode 0700; "
            "remove it or set MKB_RUNTIME_DIR to another folder"
        )
    return folder


def installation() -> str:
    """Hash of where this package and its interpreter are: two checkouts do not share servers."""
    return hashlib.sha256(f"{Path(__file__).resolve()} {sys.executable}".encode()).hexdigest()[:8]


def code_fingerprint(rooms: tuple[str, ...]) -> str:
    """Hash of the interpreter and of the named files and folders of this package (names, sizes, times).

    It is part of a server's address, so that a server of older code is not asked again.
    """
    digest = hashlib.sha256(f"{sys.executable} {sys.version}".encode())
    root = Path(__file__).resolve().parent.parent
    for room in (*rooms, "servers", "plan.py"):
        paths = [root / room] if room.endswith(".py") else sorted((root / room).rglob("*"))
        for path in paths:
            if path.suffix in (".py", ".txt") or ".so" in path.name:
                status = path.stat()
                digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
