"""Operands of a PTX statement (PTX ISA 9.x, chapter 6): literals, names, addresses, vectors."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Imm:
    """A literal. ``value`` is an int, or the raw bits of a float literal of type ``kind`` (``f32`` or ``f64``)."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Name:
    """A register, special register, variable, label or function, with a constant byte offset."""

    text: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; ``base`` is a Name, or None for an absolute address. ``extra``: tensor coordinates."""

    base: Name | None
    offset: int
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Group:
    """``(a, b, ...)``, the argument lists of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Negated:
    """``!p``."""

    name: Name


@dataclass(frozen=True)
class Pair:
    """``a|b``, two destinations."""

    first: Operand
    second: Operand


Operand = Imm | Name | Address | Vector | Group | Negated | Pair


_ATOM = re.compile(
    r"\s*(?:(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})|(?P<real>[+-]?\d+\.\d*(?:[eE][+-]?\d+)?)"
    r"|(?P<int>[+-]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+))U?|(?P<name>[A-Za-z_$%][\w$%.]*(?:::\w+)?))"
    r"(?P<more>\s*[+-]\s*-?\s*(?:0[xX][0-9a-fA-F]+|\d+))?\s*"
)


@lru_cache(maxsize=65536)
def parse_operands(text: str) -> tuple[Operand, ...]:
    """Operands from the text after an opcode. Raises ValueError."""
    return tuple(_parse_operand(part) for part in split_operands(text)) if text.strip() else ()


def split_operands(text: str) -> list[str]:
    """Split at top-level commas."""
    if not any(bracket in text for bracket in "{[("):
        return text.split(",")
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    parts.append(text[begin:])
    return parts


@lru_cache(maxsize=65536)
def _parse_operand(text: str) -> Operand:
    text = text.strip()
    if not text:
        raise ValueError("an operand is missing")
    if text[0] in "{([":
        if text[-1] != {"{": "}", "(": ")", "[": "]"}[text[0]]:
            raise ValueError(f"unbalanced brackets in operand {text!r}")
        inner = text[1:-1]
        if text[0] == "[":
            return _parse_address(inner)
        items = tuple(_parse_operand(part) for part in split_operands(inner)) if inner.strip() else ()
        return Vector(items) if text[0] == "{" else Group(items)
    if text[0] == "!":
        return Negated(Name(text[1:].strip()))
    if "|" in text:
        first, second = text.split("|", 1)
        return Pair(_parse_operand(first), _parse_operand(second))
    match = _ATOM.fullmatch(text)
    if not match:
        raise ValueError(f"cannot read operand {text!r}")
    if match["float"]:
        return Imm(int(match["float"][2:], 16), "f32" if text[1] in "fF" else "f64")
    if match["real"]:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(match["real"])))[0], "f64")
    offset = _integer(match["more"]) if match["more"] else 0
    if match["int"]:
        return Imm(_integer(match["int"]) + offset)
    return Imm(32) if match["name"] == "WARP_SZ" else Name(match["name"], offset)


def _parse_address(text: str) -> Address:
    first, *extra = split_operands(text)
    operand = _parse_operand(first)
    rest = tuple(_parse_operand(part) for part in extra)
    if isinstance(operand, Name):
        return Address(Name(operand.text), operand.offset, rest)
    if isinstance(operand, Imm):
        return Address(None, operand.value, rest)
    raise ValueError(f"cannot read address [{text}]")


def _integer(text: str) -> int:
    text = re.sub(r"\s", "", text).replace("+-", "-").replace("--", "+")
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        return sign * int(digits, 8)
    return sign * int(digits, 0)
