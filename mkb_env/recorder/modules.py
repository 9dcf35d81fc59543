"""Compiled GPU modules: what their PTX and their binary headers say."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field

PARAM_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}
PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s*(?:\.(?:global|const|shared|local)\s*)?(?:\.align\s+\d+\s*)?)?[\w$]+(?:\[(\d+)\])?"
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*[\n{.]", re.S)
FATBIN_MAGIC = b"P\xedU\xba"
EIFMT_SIZED, EIATTR_REGCOUNT = 0x04, 0x2F


@dataclass
class Compiled:
    """A module that a DSL compiled during this recording."""

    ptx: str
    cubin: bytes
    params: dict[str, list[int]] = field(default_factory=dict)

    def param_sizes(self, kernel: str) -> list[int] | None:
        """Byte sizes of the kernel's parameters as its PTX declares them, or None if it has no such kernel."""
        if not self.params:
            self.params = entry_params(self.ptx)
        return self.params.get(kernel)


def entry_params(ptx: str) -> dict[str, list[int]]:
    """Kernel name -> sizes in bytes of its parameters, read from the ``.entry`` headers."""
    found = {}
    for entry in ENTRY.finditer(ptx):
        declared = PARAM.findall(entry[2] or "")
        found[entry[1]] = [PARAM_BYTES[kind] * (int(count) if count else 1) for kind, count in declared]
    return found


def cubin_registers(cubin: bytes) -> dict[str, int]:
    """Registers per thread of each kernel, from a cubin's ``.nv.info`` section (records of ``EIATTR_REGCOUNT``)."""
    if not cubin.startswith(b"\x7fELF"):
        return {}
    (offset,) = _fields(cubin, 40, 8)
    size, count, names = _fields(cubin, 58, 2, 2, 2)
    headers = [cubin[offset + i * size : offset + (i + 1) * size] for i in range(count)]
    if names >= len(headers) or any(len(header) < 64 for header in headers):
        return {}
    sections: dict[str, bytes] = {}
    for header in headers:
        (name_at,) = _fields(header, 0, 4)
        start, length = _fields(header, 24, 8, 8)
        table = _fields(headers[names], 24, 8)[0]
        sections[_text(cubin, table + name_at)] = cubin[start : start + length]
    symbols, strings, info = (sections.get(name, b"") for name in (".symtab", ".strtab", ".nv.info"))
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, length = _fields(info, at, 1, 1, 2)
        if (form, attribute) == (EIFMT_SIZED, EIATTR_REGCOUNT) and length >= 8:
            symbol, registers = _fields(info, at + 4, 4, 4)
            (name_at,) = _fields(symbols, symbol * 24, 4)
            found[_text(strings, name_at)] = registers
        at += 4 + (length if form == EIFMT_SIZED else 0)
    return found


def _text(data: bytes, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode(errors="replace")


def _fields(data: bytes, at: int, *sizes: int) -> list[int]:
    values = []
    for size in sizes:
        values.append(int.from_bytes(data[at : at + size], "little"))
        at += size
    return values


def image_bytes(address: int) -> bytes:
    """The module image at an address: a fatbin or an ELF file, by its own header; else a C string."""
    head = ctypes.string_at(address, 16)
    if head[:4] == FATBIN_MAGIC:
        size = int.from_bytes(head[6:8], "little") + int.from_bytes(head[8:16], "little")
        return ctypes.string_at(address, size)
    if head[:4] == b"\x7fELF":
        header = ctypes.string_at(address, 64)
        ends = [  # offset, entry size and count of the program and of the section headers, whichever come last
            int.from_bytes(header[at : at + 8], "little")
            + int.from_bytes(header[size : size + 2], "little") * int.from_bytes(header[size + 2 : size + 4], "little")
            for at, size in ((32, 54), (40, 58))
        ]
        return ctypes.string_at(address, max(ends))
    return ctypes.string_at(address)
