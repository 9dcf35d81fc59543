"""Many submissions at once: recordings side by side on the CPUs, evaluations on every device.

Each of a bounded number of threads carries one submission from source to verdict; the servers behind them hold the
queues (:mod:`mkb_env.servers.waiting`), so a GPU always has the next plan ready while others compile. Submissions of
an episode that waits may overtake those of a bulk run, here and in the servers. What fails on our side is tried again.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import msgspec

from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage, Verdict
from mkb_env.recorder.protocol import Limits

EPISODE, BULK = 0, 10
"""Priorities: an environment's step, of which an agent waits for the answer, and a run over many submissions."""
AHEAD = 2
"""Submissions per device that are past their recording, or nearly, so that the device never waits."""

MOST_THREADS = 512
"""More gain nothing: one process has no time to attend to so many (docs/scale.md)."""


@dataclass(frozen=True)
class Submission:
    """What :meth:`mkb_env.judge.client.Judge.judge` is asked."""

    source: str
    problem: str
    dsl: str
    workload: str | None = None
    timing: bool = True
    draws: int = 5


@dataclass(order=True)
class _Job:
    priority: int
    arrival: int
    submission: Submission | None = field(compare=False)
    """None ends a thread."""
    verdict: Future[Verdict] = field(compare=False, default_factory=Future)


class Pipeline:
    """Judges submissions side by side; use it as a context manager.

    Args:
        devices: as for :class:`Judge`, one per GPU; verdicts come from whichever has the least to do.
        recorders: recordings at a time, by default one per CPU, of this machine or of the Ray cluster.
        waiting: submissions that may wait for a thread before :meth:`submit` blocks.
        attempts: how often a submission is tried in all if our side fails.
        limits: bounds on recording one submission.

    Raises:
        ValueError: if no device is given, or one that Judge does not know.
        ServerError: if a device is of a Ray cluster that cannot be reached.
    """

    def __init__(
        self,
        devices: Sequence[str] = ("auto",),
        *,
        recorders: int | None = None,
        waiting: int = 64,
        attempts: int = 3,
        limits: Limits | None = None,
    ) -> None:
        if not devices:
            raise ValueError("a pipeline needs at least one device, got none")
        self._judges = {name: Judge(name, limits) for name in dict.fromkeys(devices)}
        self._load = dict.fromkeys(self._judges, 0)
        self._lock = threading.Lock()
        self._attempts = attempts
        self._arrivals = itertools.count()
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue(waiting)
        workers = [judge.workers for judge in self._judges.values()]
        self.recorders = recorders or sum({each.place: each.recorders for each in workers}.values())
        count = min(self.recorders + AHEAD * sum(each.evaluators for each in workers), MOST_THREADS)
        self._threads = [threading.Thread(target=self._work, name=f"judge-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)

    def submit(self, submission: Submission, priority: int = BULK) -> Future[Verdict]:
        """Queue a submission. Blocks while too many wait. ``cancel()`` of the result drops one that has not begun."""
        job = _Job(priority, next(self._arrivals), submission)
        self._queue.put(job)
        return job.verdict

    def judge(self, submissions: Iterable[Submission], priority: int = BULK) -> Iterator[tuple[int, Verdict]]:
        """(number, verdict) of each submission, in the order in which they are done.

        Takes from ``submissions`` only as fast as they are judged.
        """
        numbers: dict[Future[Verdict], int] = {}
        most = self._queue.maxsize + len(self._threads)
        for number, submission in enumerate(submissions):
            while len(numbers) >= most:
                yield from _finished(numbers)
            numbers[self.submit(submission, priority)] = number
        while numbers:
            yield from _finished(numbers)

    def close(self, cancel: bool = False) -> None:
        """Wait for what was submitted, or, with ``cancel``, only for what has begun."""
        while cancel:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            job.verdict.cancel()
        for _ in self._threads:
            self._queue.put(_Job(1 << 30, next(self._arrivals), None))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()).submission is not None:
            if not job.verdict.set_running_or_notify_cancel():
                continue
            try:
                job.verdict.set_result(self._judge(job.submission, job.priority))
            except BaseException as error:  # bad names: the caller's to see
                job.verdict.set_exception(error)

    def _judge(self, submission: Submission, priority: int) -> Verdict:
        started = time.monotonic()
        for attempt in range(self._attempts):
            name = self._claim()
            try:
                verdict = self._judges[name].judge(
                    submission.source,
                    submission.problem,
                    submission.dsl,
                    submission.workload,
                    timing=submission.timing,
                    draws=submission.draws,
                    priority=priority,
                )
            finally:
                with self._lock:
                    self._load[name] -= 1
            if verdict.stage is not Stage.INFRA_ERROR or attempt == self._attempts - 1:
                break
            time.sleep(0.2 * 4**attempt)
        seconds = {**verdict.seconds, "total": round(time.monotonic() - started, 4)}
        return msgspec.structs.replace(verdict, seconds=seconds)

    def _claim(self) -> str:
        """The device with the least to do, which now has one more."""
        with self._lock:
            name = min(self._load, key=self._load.__getitem__)
            self._load[name] += 1
            return name


def _finished(numbers: dict[Future[Verdict], int]) -> Iterator[tuple[int, Verdict]]:
    """Wait for at least one; take what is done out of ``numbers``."""
    for future in wait(numbers, return_when=FIRST_COMPLETED).done:
        yield numbers.pop(future), future.result()
