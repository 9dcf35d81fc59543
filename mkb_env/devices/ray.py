"""Recorders and evaluators of a whole Ray cluster, for any number of drivers at once.

Each node with CPUs has one actor for its recorders and one for its simulators, each GPU one of its own
(:mod:`mkb_env.devices.ray_actors`). They have names in the namespace ``mkb`` and outlive drivers, so that all share
them. A driver sends a job to the less busy one of two, bounds what it has under way at each, and sends it to another
one if its actor or node dies or falls silent: a caller gets one answer, whoever gave it in the end.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mkb_env.devices.ray_actors import Job, Station
from mkb_env.devices.ray_cluster import NAMESPACE, connect
from mkb_env.judge.workers import Workers
from mkb_env.recorder.protocol import Failure, Recording, RecordRequest
from mkb_env.servers.client import Outcome, ServerError

ATTEMPTS = 4
"""Actors that a job is given to, one after another, before it counts as our failure."""
AHEAD = 1
"""Jobs that a driver has at an actor beyond those that the actor works on, so that it never waits for one."""
GPU_PLACES = 2
"""Jobs that a GPU's server is given at a time: it runs one and holds the next."""
REFRESH_SECONDS = 5.0
START_SECONDS = 120.0
"""How long a job waits for a cluster that has no actor that answers."""
SILENCE_SECONDS = 30.0
"""An actor that does not answer for so long is given up."""
AVOID_SECONDS = 10.0
"""An actor that failed is used again only after this long, unless there is no other."""

_lock = threading.Lock()
_fleets: dict[str, _Fleet] = {}


def hire_from_cluster(kind: str) -> Workers:
    """The workers of the cluster: ``simulator``, ``cuda``, or empty: GPUs if there are any, else simulators.

    Raises:
        ServerError: if there is no cluster, or it has no such device.
    """
    connect()
    kind = kind or ("cuda" if _fleet("cuda").size()[0] else "simulator")
    recorders, evaluators = _fleet("recorder"), _fleet(kind)
    (nodes, recordings), (devices, _) = recorders.size(), evaluators.size()
    if not nodes or not devices:
        raise ServerError(f"the Ray cluster has no {'GPU' if nodes else 'CPU'}: start a node that has one")
    return Workers(RayRecorder(recorders), RayEvaluator(evaluators), kind, "ray", recordings, devices)


def stop_actors() -> int:
    """End all actors and the servers behind them, and free their GPUs; returns how many there were."""
    connect()
    import ray

    names = [found["name"] for found in ray.util.list_named_actors(all_namespaces=True) if _is_ours(found)]
    for name in names:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            actor = ray.get_actor(name, NAMESPACE)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.close.remote(), timeout=5)
            ray.kill(actor)
    with _lock:
        _fleets.clear()
    return len(names)


def _is_ours(found: dict[str, str]) -> bool:
    return found["namespace"] == NAMESPACE and found["name"].partition("-")[0] in ("recorder", "simulator", "cuda")


# -- what a judge uses ------------------------------------------------------------------------------------------------


class RayRecorder:
    """Records on the cluster's CPUs."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet

    def record(
        self, request: RecordRequest, on_progress: Callable[[str], None] | None = None, priority: int = 0
    ) -> Recording:
        """The plans of a submission, or why there is none. Never raises for what the submission does."""
        try:
            answer = self._fleet.call(Job(msgspec.msgpack.encode(request), priority=priority), on_progress)
        except ServerError as error:
            return Recording(failure=Failure("infra_error", f"recording failed: {error}"))
        return msgspec.msgpack.decode(answer, type=Recording)


class RayEvaluator:
    """Evaluates on the cluster's GPUs or simulators."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet

    def call(
        self,
        payload: bytes,
        *,
        seconds: float,
        memory_bytes: int = 0,
        priority: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run one job and wait for its end. Raises ServerError if our side fails."""
        answer = self._fleet.call(Job(payload, seconds, memory_bytes, priority), on_progress)
        return msgspec.msgpack.decode(answer, type=Outcome)


# -- actors -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Post:
    """An actor, seen from this driver."""

    name: str
    places: int
    actor: Any
    hello: Any
    """The answer to a first look, until it has come."""
    ours: int = 0
    """This driver's jobs there."""
    avoid_until: float = 0.0


@dataclass
class _Fleet:
    """The actors of one role, and this driver's jobs on them."""

    role: str
    _posts: dict[str, _Post] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: list[tuple[int, int]] = field(default_factory=list)
    _arrivals: Iterator[int] = field(default_factory=itertools.count)
    _refreshed: float = -REFRESH_SECONDS
    _failed: dict[str, float] = field(default_factory=dict)
    """Until when to avoid actors that failed here, by name."""
    _complaint: str = ""
    """Why an actor last failed to answer at all."""

    def size(self) -> tuple[int, int]:
        """How many actors there are, and how many jobs they do at a time in all."""
        with self._changed:
            self._refresh()
            return len(self._posts), sum(post.places for post in self._posts.values())

    def call(self, job: Job, on_progress: Callable[[str], None] | None) -> bytes:
        """Have a job done by one actor after another until one answers. Raises ServerError if none does."""
        from ray.exceptions import RayError, RayTaskError

        tried: list[str] = []
        for _ in range(ATTEMPTS):
            post = self._choose(job.priority, tried)
            try:
                return _converse(post, job, on_progress)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                reason = str(cause).strip()
                tried.append(post.name)
                self._lose(post, dead=not isinstance(error, RayTaskError))
            finally:
                self._release(post)
        raise ServerError(f"{ATTEMPTS} actors failed one after another, the last ({tried[-1][:20]}): {reason[:500]}")

    def _choose(self, priority: int, tried: list[str]) -> _Post:
        """The less busy one of two actors that have room for one more of this driver's jobs."""
        first, second = self._take(priority, tried)
        if second is None:
            return first
        loads = _loads((first, second))
        for post, load in zip((first, second), loads, strict=True):
            if load is None:
                self._lose(post, dead=True)
        best = second if _busy(loads[1]) < _busy(loads[0]) else first
        self._release(second if best is first else first)
        return best

    def _take(self, priority: int, tried: list[str]) -> tuple[_Post, _Post | None]:
        """Two actors, or one if there are no more, each with room kept for a job; waits for it, by priority."""
        turn = priority, next(self._arrivals)
        deadline = time.monotonic() + START_SECONDS
        with self._changed:
            heapq.heappush(self._waiting, turn)
            try:
                while True:
                    self._refresh()
                    able = [post for post in tuple(self._posts.values()) if self._answers(post)]
                    if self._waiting[0] == turn and (chosen := _two(able, tried)):
                        for post in chosen:
                            post.ours += 1
                        return chosen[0], chosen[1] if len(chosen) > 1 else None
                    if able:
                        deadline = time.monotonic() + START_SECONDS
                    elif time.monotonic() > deadline:
                        why = self._complaint or "their actors are still to start"
                        raise ServerError(f"no {self.role} of the cluster answered for {START_SECONDS:g} s: {why}")
                    self._changed.wait(1.0 if able else 0.1)
            finally:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
                self._changed.notify_all()

    def _answers(self, post: _Post) -> bool:
        """Whether an actor has answered once; one that cannot is forgotten, and found or made again."""
        import ray

        if post.hello is not None and ray.wait([post.hello], timeout=0)[0]:
            try:
                ray.get(post.hello)
                post.hello = None
            except ray.exceptions.RayError as error:
                self._complaint = " ".join(str(error).split())[-300:]
                self._lose(post, dead=True)
        return post.hello is None

    def _release(self, post: _Post) -> None:
        with self._changed:
            post.ours -= 1
            self._changed.notify_all()

    def _lose(self, post: _Post, dead: bool) -> None:
        """Avoid an actor for a while; one that is dead, or silent, must also answer anew before it is used."""
        with self._changed:
            post.avoid_until = self._failed[post.name] = time.monotonic() + AVOID_SECONDS
            if dead and self._posts.get(post.name) is post:
                del self._posts[post.name]
                self._refreshed = min(self._refreshed, time.monotonic() - REFRESH_SECONDS + 0.5)

    def _refresh(self) -> None:
        """Learn which nodes there are; make the actors that they lack."""
        if time.monotonic() < self._refreshed + REFRESH_SECONDS:
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._refreshed = time.monotonic()
        wanted: dict[str, tuple[str, int]] = {}
        for node in ray.nodes():
            if node["Alive"]:
                wanted |= _wanted(self.role, node["NodeID"], node["Resources"])
        for name in self._posts.keys() - wanted.keys():
            del self._posts[name]
        for name in wanted.keys() - self._posts.keys():
            node_id, places = wanted[name]
            options = {
                "name": name,
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
                "max_restarts": -1,
                "max_concurrency": 4096,
                "num_cpus": 0,
                "num_gpus": 1 if self.role == "cuda" else 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            }
            actor: Any = ray.remote(Station).options(**options).remote(self.role, places)
            self._posts[name] = _Post(name, places, actor, actor.look.remote(""), 0, self._failed.get(name, 0.0))


def _fleet(role: str) -> _Fleet:
    with _lock:
        return _fleets.setdefault(role, _Fleet(role))


def _wanted(role: str, node: str, resources: dict[str, float]) -> dict[str, tuple[str, int]]:
    """Names of the actors that a node should have, with the node and their places.

    Only GPUs are reserved. An actor needs next to no CPU itself, and one that had to wait for a CPU that someone else
    holds would never come.
    """
    if role == "cuda":
        return {f"cuda-{node}-{number}": (node, GPU_PLACES) for number in range(int(resources.get("GPU", 0)))}
    cpus = int(resources.get("CPU", 0))
    return {f"{role}-{node}": (node, cpus)} if cpus else {}


def _two(able: list[_Post], tried: list[str]) -> list[_Post]:
    """Up to two actors with room: not those tried, nor those to avoid, if there are others; the least busy of ours."""
    now = time.monotonic()
    fresh = [post for post in able if post.name not in tried and post.avoid_until < now]
    room = [post for post in fresh or able if post.ours < post.places + AHEAD]
    return heapq.nsmallest(2, room, key=lambda post: (post.ours / post.places, secrets.randbits(30)))


def _loads(posts: tuple[_Post, ...]) -> list[float | None]:
    """How busy each is; None for one that fails, or stays silent although another answered."""
    import ray

    references = [post.actor.look.remote("") for post in posts]
    ray.wait(references, num_returns=len(references), timeout=2)
    found: list[float | None] = []
    for reference in references:
        try:
            found.append(ray.get(reference, timeout=0)[1])
        except ray.exceptions.RayError:
            found.append(None)
    return found


def _busy(load: float | None) -> float:
    return float("inf") if load is None else load


def _converse(post: _Post, job: Job, on_progress: Callable[[str], None] | None) -> bytes:
    """Have an actor do a job. Raises RayError if it fails, dies, or does not answer for SILENCE_SECONDS."""
    import ray

    ticket, shown = secrets.token_hex(8), ""
    answer = post.actor.call.remote(ticket, job)
    while not ray.wait([answer], timeout=0.2 if on_progress else 5.0)[0]:
        stage, _ = ray.get(post.actor.look.remote(ticket), timeout=SILENCE_SECONDS)
        if on_progress and stage != shown:
            on_progress(stage)
            shown = stage
    return ray.get(answer)
