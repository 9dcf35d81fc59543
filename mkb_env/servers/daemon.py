"""How a server process begins: it takes its address, then leaves the client that started it."""

from __future__ import annotations

import hmac
import os
import socket
from pathlib import Path

from mkb_env.servers.wire import Header, short_address, token_digest


def authorised(header: Header, digest: bytes) -> bool:
    """Whether the header's token has this digest."""
    return hmac.compare_digest(token_digest(header.token), digest)


def listen(path: str) -> socket.socket:
    """Bind and listen at ``path``, then go on in a detached process; the first one exits with status 0.

    The client that started it waits for that exit: from then on it can connect, and is served once imports are done.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_address(Path(path)) as address:
        listener.bind(address)
    listener.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()
    return listener


def idle_seconds() -> float:
    """How long a server waits for the next job before it ends (``MKB_IDLE_SECONDS``, default 600)."""
    return float(os.environ.get("MKB_IDLE_SECONDS", "600"))
