"""Text as a Gymnasium space: sources, notes and reports, which ``gymnasium.spaces.Text`` cannot hold.

``Text`` has a finite character set, draws 300,000 random characters as a sample, prints its whole character set, and
comes back as garbage from ``AsyncVectorEnv`` with shared memory, which reads strings once and never again.
:class:`Utf8` admits what a Python source or a compiler's report may contain, and works in both vector environments.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

SAMPLE_WORDS = (
    "warp",
    "tile",
    "barrier",
    "shared",
    "memory",
    "lane",
    "vector",
    "stride",
    "größe",
    "→",
    "load",
    "store",
)
LENGTH_BYTES = 8


class Utf8(gym.Space[str]):
    """Every string that is at most ``max_bytes`` long in UTF-8; the empty string, newlines and CRLF included.

    Not in the space: lone surrogates, which have no UTF-8 form, and NUL, which no Python source may contain.

    Args:
        max_bytes: longest encoding admitted, in bytes.
        seed: of :meth:`sample`.

    Raises:
        ValueError: if ``max_bytes`` is not a positive integer.
    """

    def __init__(self, max_bytes: int, seed: int | np.random.Generator | None = None) -> None:
        if not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes must be a positive integer, got {max_bytes!r}")
        self.max_bytes = max_bytes
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: text is not a fixed number of numbers."""
        return False

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or len(x) > self.max_bytes or "\0" in x:
            return False
        try:
            return len(x.encode()) <= self.max_bytes
        except UnicodeEncodeError:
            return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """One to three lines of a few words: prose, hence never a Python program.

        Raises:
            ValueError: if a mask or probability is given; the space has neither.
        """
        if mask is not None or probability is not None:
            raise ValueError("Utf8 samples without mask and probability; pass neither")
        rows = self.np_random.integers(1, 4)
        picks = [self.np_random.choice(SAMPLE_WORDS, self.np_random.integers(2, 6)) for _ in range(rows)]
        text = "\n".join(" ".join(words) for words in picks)
        return text.encode()[: self.max_bytes].decode(errors="ignore")

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: Iterable[Any]) -> list[str]:
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utf8) and self.max_bytes == other.max_bytes

    def __repr__(self) -> str:
        return f"Utf8({self.max_bytes})"


def printable(text: str, max_bytes: int) -> str:
    """``text`` made a member of ``Utf8(max_bytes)``: surrogates and NUL escaped, the end cut off if too long."""
    data = text.encode(errors="backslashreplace").replace(b"\0", b"\\x00")
    return data[:max_bytes].decode(errors="ignore")


class SharedTexts(Sequence[str]):
    """The strings of all environments in shared memory, decoded whenever they are read.

    ``AsyncVectorEnv`` asks for a view once and hands out (copies of) it ever after; a copy of this one is a tuple of
    the strings that the memory holds at that moment.
    """

    def __init__(self, memory: Any, max_bytes: int, environments: int) -> None:
        self.memory, self.max_bytes, self.environments = memory, max_bytes, environments

    def slot(self, index: int) -> memoryview:
        """The bytes of one environment: its string's length, then the string."""
        size = LENGTH_BYTES + self.max_bytes
        return np.frombuffer(self.memory.get_obj(), np.uint8).data[index * size : (index + 1) * size]

    def put(self, index: int, text: str) -> None:
        """Store the string of one environment."""
        data, slot = text.encode(), self.slot(index)
        slot[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data
        slot[:LENGTH_BYTES] = len(data).to_bytes(LENGTH_BYTES, "little")

    def __len__(self) -> int:
        return self.environments

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[str]:
        for index in range(self.environments):
            slot = self.slot(index)
            length = int.from_bytes(slot[:LENGTH_BYTES], "little")
            yield bytes(slot[LENGTH_BYTES : LENGTH_BYTES + length]).decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(Utf8)
def _create_shared_memory(space: Utf8, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.Array(ctypes.c_uint8, n * (LENGTH_BYTES + space.max_bytes))


@read_from_shared_memory.register(Utf8)
def _read_from_shared_memory(space: Utf8, shared_memory: Any, n: int = 1) -> SharedTexts:
    return SharedTexts(shared_memory, space.max_bytes, n)


@write_to_shared_memory.register(Utf8)
def _write_to_shared_memory(space: Utf8, index: int, value: str, shared_memory: Any) -> None:
    SharedTexts(shared_memory, space.max_bytes, index + 1).put(index, value)


def _no_numbers(space: Utf8, *_: Any) -> NoReturn:
    raise TypeError(
        f"{space} cannot be flattened into numbers: text has no fixed size; "
        "take the numeric entries of the observation, or tokenize the text, before a flattening wrapper"
    )


for _function in (flatdim, flatten, unflatten, flatten_space):
    _function.register(Utf8, _no_numbers)
