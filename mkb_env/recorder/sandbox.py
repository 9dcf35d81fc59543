"""Confinement of a recording: what untrusted host code may reach.

Three layers, each used where the kernel offers it and reported by name:

* ``memory``, ``time``: resource limits on writable private memory and file sizes; the server kills at the deadline;
* ``network``, ``processes``: empty network, IPC and process namespaces (a user namespace makes them unprivileged);
* ``files``: a Landlock domain that allows reading the interpreter, the system's libraries and the compilers, and
  writing one scratch folder. This package's problems, agents and store are outside of it, as are home folders. Landlock
  also forbids tracing and, from ABI 6 on, signalling processes outside the domain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
import sysconfig
from pathlib import Path

CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
ACCESS_EXECUTE = 1 << 0
ACCESS_READ_FILE = 1 << 2
ACCESS_READ_DIR = 1 << 3
FILE_ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
READ = ACCESS_EXECUTE | ACCESS_READ_FILE | ACCESS_READ_DIR
NET_ACCESS = 0b11  # bind and connect over TCP, from ABI 4 on
SCOPES = 0b11  # abstract Unix sockets and signals, from ABI 6 on
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522

MAX_FILE_BYTES = 256 << 20
MAX_OPEN_FILES = 256

libc = ctypes.CDLL(None, use_errno=True)


def confine(memory_bytes: int, scratch: Path) -> tuple[str, ...]:
    """Confine this process and its descendants; returns the names of the layers in force.

    Args:
        memory_bytes: writable private memory the process may add to what it has, 0 for no limit.
        scratch: the one folder it may write to.
    """
    layers = [*_limit_resources(memory_bytes), *_isolate(), *_restrict_files(scratch)]
    _drop_capabilities()
    return tuple(layers)


def _limit_resources(memory_bytes: int) -> list[str]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    _prefer_as_oom_victim()
    if not memory_bytes:
        return ["time"]
    # RLIMIT_DATA counts writable private mappings only, so reserved address space (PROT_NONE) stays free of charge.
    limit = _data_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return ["time", "memory"]


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _prefer_as_oom_victim() -> None:
    with contextlib.suppress(OSError):  # not offered everywhere, and only a preference
        Path("/proc/self/oom_score_adj").write_text("1000")


def _isolate() -> list[str]:
    uid, gid = os.getuid(), os.getgid()
    wanted = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID
    if libc.unshare(wanted) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return []
        _map_user(uid, gid)
        return ["network"]
    _map_user(uid, gid)
    return ["network", "processes"]


def _drop_capabilities() -> None:
    """Give up what a user namespace (or root) grants: nothing here needs it."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=II", CAPABILITY_VERSION, 0)
    libc.capset(header, bytes(24))


def _map_user(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            Path(f"/proc/self/{name}").write_text(text)
        except OSError:
            return  # unmapped ids still work for everything a recording does


def _restrict_files(scratch: Path) -> list[str]:
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return []
    handled = FILE_ACCESS_BY_ABI[max(known for known in FILE_ACCESS_BY_ABI if known <= abi)]
    attributes = struct.pack("=QQQ", handled, NET_ACCESS if abi >= 4 else 0, SCOPES if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return []
    try:
        for path in readable_paths():
            _allow(ruleset, path, READ & handled)
        for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
            _allow(ruleset, Path(device), handled & (ACCESS_READ_FILE | 1 << 1))
        _allow(ruleset, scratch, handled & ~ACCESS_EXECUTE)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
            return []
    finally:
        os.close(ruleset)
    return ["files"]


def readable_paths() -> list[Path]:
    """Files and folders a recording may read: system libraries, the interpreter and installed packages but this one."""
    package = Path(__file__).resolve().parent.parent
    paths = [
        Path(p)
        for p in (
            "/usr",
            "/lib",
            "/lib64",
            "/bin",
            "/etc/ld.so.cache",
            "/etc/localtime",
            "/proc",
            "/sys/devices/system/cpu",
        )
    ]
    paths += [Path(p) for key in ("stdlib", "platstdlib") if (p := sysconfig.get_paths().get(key))]
    paths += [Path(p) / "lib" for p in (sys.base_prefix,) if (Path(p) / "lib").is_dir()]
    for entry in {*sys.path, *(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))}:
        folder = Path(entry)
        if entry and folder.is_dir():
            if (folder / "mkb_env").exists() or package.is_relative_to(folder.resolve()):
                paths += _packages_beside_ours(folder)
            else:
                paths.append(folder)
    paths += [package / name for name in ("recorder", "dsl", "plan.py")]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def _packages_beside_ours(folder: Path) -> list[Path]:
    """The installed packages of a site folder that also holds this package; nothing of a bare checkout."""
    if not folder.name.endswith("-packages"):
        return []
    return [child for child in folder.iterdir() if child.name != "mkb_env"]


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            access &= ACCESS_EXECUTE | 1 << 1 | ACCESS_READ_FILE | 1 << 14 | 1 << 15
        libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", access, descriptor), 0)
    finally:
        os.close(descriptor)
