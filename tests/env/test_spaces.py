"""The text space."""

from __future__ import annotations

import ast
import copy
import pickle

import gymnasium as gym
import pytest
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.utils.env_checker import check_space_limit
from gymnasium.vector.utils import batch_space

from mkb_env.spaces import Utf8, printable


@pytest.mark.parametrize("text", ["", "a b\nc\r\n\td", "größe → 🙂", "a" * 30])
def test_admits_real_text(text: str) -> None:
    assert text in Utf8(30)


@pytest.mark.parametrize("text", ["a" * 31, "→" * 11, "\ud800", "a\0b", b"bytes", None, 3, ["a"]])
def test_refuses_what_is_too_long_or_no_text(text: object) -> None:
    assert text not in Utf8(30)


def test_samples_are_short_prose_in_the_space_and_follow_the_seed() -> None:
    space, same = Utf8(300_000, seed=1), Utf8(300_000, seed=1)
    samples = [space.sample() for _ in range(200)]
    assert samples == [same.sample() for _ in range(200)]
    for sample in samples:
        assert sample in space
        assert len(sample) < 200
        with pytest.raises(SyntaxError):
            ast.parse(sample)
    assert len(set(samples)) > 100
    assert Utf8(3).sample() in Utf8(3)


def test_is_a_proper_space() -> None:
    space = Utf8(30)
    assert space == Utf8(30)
    assert space != Utf8(31)
    assert space != spaces.Text(30)
    assert repr(space) == "Utf8(30)"
    assert copy.deepcopy(space) == space
    assert pickle.loads(pickle.dumps(space)) == space
    assert space.from_jsonable(space.to_jsonable(["a", "→"])) == ["a", "→"]
    assert batch_space(space, 2) == spaces.Tuple((space, space))
    check_space_limit(space, "observation")
    with pytest.raises(ValueError, match="positive integer"):
        Utf8(0)
    with pytest.raises(ValueError, match="without mask"):
        space.sample(mask=())


def test_flattening_fails_loudly() -> None:
    space = Utf8(30)
    calls = [
        lambda: flatten_space(space),
        lambda: flatten(space, "a"),
        lambda: flatdim(space),
        lambda: unflatten(space, "a"),
        lambda: flatten_space(spaces.Dict({"text": space, "number": spaces.Discrete(2)})),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="cannot be flattened into numbers"):
            call()


def test_flatten_observation_fails_loudly() -> None:
    import mkb_env  # noqa: F401

    env = gym.make("MKB/mlp-norm-cute-v0", device="simulator")
    with pytest.raises(TypeError, match="cannot be flattened into numbers"):
        gym.wrappers.FlattenObservation(env)


@pytest.mark.parametrize("text", ["plain", "a\0b", "\ud800", "→" * 50])
def test_printable_is_in_the_space(text: str) -> None:
    assert printable(text, 31) in Utf8(31)
    assert printable("plain", 31) == "plain"
