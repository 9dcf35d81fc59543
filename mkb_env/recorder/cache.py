"""Recordings kept on disk, by what made them: the same source is not compiled twice.

A recording follows from the source, the DSL, the calls, the toolchain and this package's recorder; the key is a hash of
all of them. Only the client writes here, after it has checked a recorder's answer, and only recordings that succeeded:
a submission runs in a sandbox that cannot open the folder. What is read back is untrusted data like any plan, and is
validated like one.

``MKB_CACHE_DIR`` names the folder (default ``mkb-env`` in ``XDG_CACHE_HOME`` or ``~/.cache``); empty means no cache.
``MKB_CACHE_BYTES`` bounds it (default 4 GiB): the entries used longest ago go first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets
from importlib import metadata
from pathlib import Path

import msgspec

from mkb_env.recorder.protocol import Recording, RecordRequest
from mkb_env.servers.wire import code_fingerprint

PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm", "apache-tvm-ffi", "nvidia-cuda-nvrtc", "torch")
DEFAULT_BYTES = 4 << 30
TRIM_EVERY = 32
"""One new entry in so many looks at all that are there."""
DIGEST = 32


class RecordingCache:
    """A folder of recordings. Safe with any number of processes; losing an entry costs a recording."""

    def __init__(self, folder: Path, most_bytes: int = DEFAULT_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    @staticmethod
    def from_environment() -> RecordingCache | None:
        """The cache that the environment names, or None if it names none."""
        chosen = os.environ.get("MKB_CACHE_DIR")
        if chosen == "":
            return None
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return RecordingCache(
            Path(chosen) if chosen else base / "mkb-env", int(os.environ.get("MKB_CACHE_BYTES") or DEFAULT_BYTES)
        )

    def get(self, request: RecordRequest) -> Recording | None:
        """The recording of an equal request, without its times; None if there is none or its file is damaged."""
        path = self._path(request)
        try:
            data = path.read_bytes()
            if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
                raise ValueError("damaged")
            recording = msgspec.msgpack.decode(data[DIGEST:], type=Recording)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: last to go
        return msgspec.structs.replace(recording, seconds={})

    def put(self, request: RecordRequest, recording: Recording) -> None:
        """Keep a recording that succeeded; a full or read-only disk is no error."""
        if recording.failure is not None:
            return
        body = msgspec.msgpack.encode(recording)
        path = self._path(request)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                draft.write_bytes(hashlib.sha256(body).digest() + body)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        if secrets.randbelow(TRIM_EVERY) == 0:
            self.trim()

    def _path(self, request: RecordRequest) -> Path:
        digest = hashlib.sha256(toolchain().encode())
        digest.update(msgspec.msgpack.encode((request.source, request.dsl, request.calls)))
        name = digest.hexdigest()
        return self.folder / name[:2] / name

    def trim(self) -> None:
        """Delete the entries used longest ago until the rest fits."""
        entries = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.most_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


@functools.cache
def toolchain() -> str:
    """What besides the request decides a recording: package versions and this package's own recorder."""
    found = []
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join([*found, platform.python_version(), code_fingerprint(("recorder", "dsl"))])
