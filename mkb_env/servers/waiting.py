"""Jobs that a server has taken but not begun: by priority, then by arrival. Those whose client has gone are dropped."""

from __future__ import annotations

import heapq
import itertools
import socket
from dataclasses import dataclass, field

from mkb_env.servers.daemon import authorised
from mkb_env.servers.wire import Header, receive_header

LIMIT = 256
"""A server with this many waiting takes no more: later clients wait for their connection."""


@dataclass(order=True)
class Request:
    """One waiting job. Smaller priorities go first."""

    priority: int
    arrival: int
    header: Header = field(compare=False)
    control: socket.socket = field(compare=False)
    data: socket.socket = field(compare=False)

    @property
    def abandoned(self) -> bool:
        """Whether the client has closed its control connection, on which it sends nothing after the header."""
        try:
            self.control.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.control.close()
        self.data.close()


class Waiting:
    """A server's queue."""

    def __init__(self) -> None:
        self._heap: list[Request] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def full(self) -> bool:
        """Whether no more should be taken."""
        return len(self._heap) >= LIMIT

    def add(self, header: Header, control: socket.socket, data: socket.socket) -> None:
        heapq.heappush(self._heap, Request(header.priority, next(self._arrivals), header, control, data))

    def pop(self) -> Request | None:
        """The next job whose client still waits."""
        while self._heap:
            request = heapq.heappop(self._heap)
            if not request.abandoned:
                return request
            request.close()
        return None

    def close(self) -> None:
        for request in self._heap:
            request.close()


def take(listener: socket.socket, digest: bytes) -> tuple[Header, socket.socket, socket.socket | None] | None:
    """Accept one client and read its header; None if it may not ask, or sends none within a second.

    Raises:
        TimeoutError: if the listener has a timeout and nobody came.
    """
    control, _ = listener.accept()
    data: socket.socket | None = None
    try:
        control.settimeout(1)
        header, data = receive_header(control)
        control.settimeout(None)
        if authorised(header, digest) and (header.stop or data is not None):
            return header, control, data
    except Exception:  # whatever comes from whoever connects
        pass
    for connection in (control, data):
        if connection is not None:
            connection.close()
    return None
