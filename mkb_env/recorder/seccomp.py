"""A system-call filter: what a recording has no use for, and what would lead around the other layers.

Landlock and namespaces leave gaps: a socket that has a path can be connected to from any namespace, ``unshare`` gives
new capabilities in a new user namespace, shared memory and processes escape a limit on private memory. A denied call
fails with EPERM, which Python reports as PermissionError.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
DENY = 0x00050000 | errno.EPERM
UNKNOWN = 0x00050000 | errno.ENOSYS

LOAD, EQUAL, ANY_BIT, GREATER_EQUAL, RETURN, AND = 0x20, 0x15, 0x45, 0x35, 0x06, 0x54
NUMBER_AT, ARCH_AT, ARGS_AT = 0, 4, 16
CLONE_THREAD = 0x10000
SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name -> number on x86-64, on arm64 (None: not there); from the kernel's syscall tables
DENIED = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "ptrace": (101, 117), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "shmget": (29, 194),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "init_module": (175, 105),
    "kexec_load": (246, 104), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
}  # fmt: skip
CLONE = (56, 220)
CLONE3 = 435
MMAP = (9, 222)

libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install() -> bool:
    """Install the filter for this process and its descendants; False where the kernel or the machine has none."""
    machine = platform.machine()
    if machine not in ARCHES:
        return False
    code = b"".join(_program(machine))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(len(code) // 8, code)
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def _program(machine: str) -> list[bytes]:
    """Classic BPF: eight bytes an instruction, jumps counted in instructions from the next one."""
    column = list(ARCHES).index(machine)
    code = [
        _op(LOAD, ARCH_AT),
        _op(EQUAL, ARCHES[machine], 1, 0),
        _op(RETURN, DENY),
        _op(LOAD, NUMBER_AT),
    ]
    if machine == "x86_64":  # the x32 numbers are the same calls again
        code += [_op(GREATER_EQUAL, 0x40000000, 0, 1), _op(RETURN, DENY)]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            code += [_op(EQUAL, numbers[column], 0, 1), _op(RETURN, DENY)]
    # the C library falls back from clone3, whose flags a filter cannot see, to clone: new threads only
    code += [_op(EQUAL, CLONE3, 0, 1), _op(RETURN, UNKNOWN)]
    code += [
        _op(EQUAL, CLONE[column], 0, 4),
        _op(LOAD, ARGS_AT),
        _op(ANY_BIT, CLONE_THREAD, 1, 0),
        _op(RETURN, DENY),
        _op(RETURN, ALLOW),
    ]
    code += [
        _op(EQUAL, MMAP[column], 0, 5),
        _op(LOAD, ARGS_AT + 3 * 8),
        _op(AND, SHARED_ANONYMOUS),
        _op(EQUAL, SHARED_ANONYMOUS, 0, 1),
        _op(RETURN, DENY),
        _op(RETURN, ALLOW),
    ]
    return [*code, _op(RETURN, ALLOW)]


def _op(code: int, value: int | None, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value or 0)
