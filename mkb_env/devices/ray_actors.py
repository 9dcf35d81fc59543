"""The actors of a Ray cluster: each hands jobs to the servers of its own node, by priority and a few at a time.

No submission's code runs in an actor: it runs where it does without Ray, in the recorder server's confined children and
in the evaluator servers. Neither does Ray's environment reach those: :data:`mkb_env.servers.client.ENVIRONMENT` is all.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from mkb_env.judge.workers import evaluator_server
from mkb_env.recorder.client import RecorderClient
from mkb_env.recorder.protocol import RecordRequest
from mkb_env.servers.client import ServerError, stop


class Job(msgspec.Struct, frozen=True):
    """What an actor is asked: a RecordRequest, or the payload of an evaluator's job with its limits."""

    payload: bytes
    seconds: float = 0.0
    memory_bytes: int = 0
    priority: int = 0


class Turns:
    """Lets a number of jobs work at a time; of those that wait, the smallest priority goes first."""

    def __init__(self, places: int) -> None:
        self.places, self.working = places, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @property
    def load(self) -> float:
        """Jobs here, for each place."""
        return (self.working + len(self._waiting)) / self.places

    async def take(self, priority: int) -> None:
        """Wait for a turn."""
        if self.working < self.places:
            self.working += 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """End a turn: it goes to the next that waits."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.working -= 1


class Station:
    """Takes the jobs of one node's recorders, of one node's simulators, or of one GPU.

    Args:
        role: ``recorder``, ``simulator`` or ``cuda``; for the last one, Ray has given this actor a GPU.
        places: jobs at a time.

    Raises:
        ServerError: if Ray names the GPU by something else than its number.
    """

    def __init__(self, role: str, places: int) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's idea of what an actor needs, not what our servers do
        self._role, self._turns = role, Turns(places)
        self._stages: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(places)
        self._recorder = RecorderClient()
        self._server = self._recorder.server if role == "recorder" else evaluator_server(_device(role))

    async def call(self, ticket: str, job: Job) -> bytes:
        """Do a job: an encoded Recording or Outcome. Raises ServerError if our side fails."""
        self._stages[ticket] = ""
        try:
            await self._turns.take(job.priority)
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._do, ticket, job)
            finally:
                self._turns.give()
        finally:
            del self._stages[ticket]

    async def look(self, ticket: str) -> tuple[str, float]:
        """The last stage that a job reported, and the load of this actor. That it answers says that it lives."""
        return self._stages.get(ticket, ""), self._turns.load

    async def close(self) -> None:
        """Ask the server behind this actor to end."""
        stop(self._server.socket_path)

    def _do(self, ticket: str, job: Job) -> bytes:
        def progress(stage: str) -> None:
            self._stages[ticket] = stage

        return self._record(job, progress) if self._role == "recorder" else self._evaluate(job, progress)

    def _record(self, job: Job, progress: Callable[[str], None]) -> bytes:
        request = msgspec.msgpack.decode(job.payload, type=RecordRequest)
        recording = self._recorder.record(request, progress, job.priority)
        if recording.failure and recording.failure.kind == "infra_error":
            raise ServerError(recording.failure.message)
        return msgspec.msgpack.encode(recording)

    def _evaluate(self, job: Job, progress: Callable[[str], None]) -> bytes:
        outcome = self._server.call(
            job.payload,
            seconds=job.seconds,
            memory_bytes=job.memory_bytes,
            priority=job.priority,
            on_progress=progress,
        )
        return msgspec.msgpack.encode(outcome)


def _device(role: str) -> str:
    """The device of this actor, as the node numbers it: other clients of the node meet the same server."""
    if role == "simulator":
        return role
    import ray

    (name,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if not name.isdigit():
        raise ServerError(f"Ray must name GPUs by their numbers, got {name!r}: start it without CUDA_VISIBLE_DEVICES")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray's, which would renumber
    return f"cuda:{name}"
