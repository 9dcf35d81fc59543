"""How a process comes to a Ray cluster: an existing one, or one of its machine that its processes share."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
import threading

from mkb_env.servers.client import ServerError
from mkb_env.servers.wire import runtime_folder

NAMESPACE = "mkb"
STORE_BYTES = 1 << 30
"""Object store of a cluster that is started here; a plan has some 20 to 100 KB."""

_lock = threading.RLock()
_forked = False


def _after_fork() -> None:
    """Ray does not survive a fork: its threads are gone and its connections are the parent's."""
    global _forked, _lock
    _lock = threading.RLock()
    ray = sys.modules.get("ray")
    _forked = _forked or (ray is not None and ray.is_initialized())


os.register_at_fork(after_in_child=_after_fork)


def connect() -> None:
    """Join the cluster of ``RAY_ADDRESS``, else the one that this user's processes share here, else start that one.

    Raises:
        ServerError: if there is no cluster at ``RAY_ADDRESS``, or none can be started, or this process was forked from
            one that uses Ray.
    """
    with _lock:
        if _forked:
            raise ServerError(
                "this process was forked from one that uses Ray, which Ray does not survive: start it by spawning "
                '(make_vec: vector_kwargs={"context": "spawn"})'
            )
        address = os.environ.get("RAY_ADDRESS", "")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if not address or address.startswith(("127.", "localhost:", "local")):
            # Its name is of another system, but what it does is right: Ray then stays on the loopback interface.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if not address:  # Ray's default where it starts a cluster, but not where it joins one: both have to agree
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        if ray.is_initialized():
            return
        try:
            if address:
                _join(address)
            else:
                _join_or_start()
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"at {address}" if address else "on this machine"
            reason = " ".join(str(error).split())[:300]
            raise ServerError(f"no Ray cluster {where}: {reason}") from None


def _join(address: str) -> None:
    import ray

    if ":" in address and "//" not in address and not _listens(address):  # Ray itself would try for minutes
        raise ConnectionError("nothing listens there")
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(f"{error} (if it asks for a token, set RAY_AUTH_MODE=token here too)") from None


def _join_or_start() -> None:
    import ray

    with open(runtime_folder() / "ray.lock", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several drivers at once make one cluster, not several
        file.seek(0)
        address = file.read()
        if address and _listens(address):
            with contextlib.suppress(ConnectionError):
                return _join(address)
        ray.init(
            "local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=STORE_BYTES,
        )
        file.truncate(0)
        file.write(ray.get_runtime_context().gcs_address)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
    except (OSError, ValueError):
        return False
    return True
