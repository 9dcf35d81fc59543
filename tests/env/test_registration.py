"""Ids, imports, and Gymnasium's own checker over every id."""

from __future__ import annotations

import subprocess
import sys
import time

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import mkb_env
from mkb_env.problems import FAMILIES, catalog

IDS = sorted(name for name in gym.registry if name.startswith("MKB/"))


def test_every_problem_and_family_has_an_id_per_dsl() -> None:
    problems = catalog()
    stems = {slug.replace("_", "-") for slug in problems} | {FAMILIES[ref.family] for ref in problems.values()}
    assert set(IDS) == {f"MKB/{stem}-{dsl}-v0" for stem in stems for dsl in ("cute", "tirx")}
    assert {"MKB/fused-attn-cute-v0", "MKB/mlp-norm-tirx-v0"} < set(IDS)


@pytest.mark.parametrize("name", IDS)
def test_check_env_is_content_and_quick(name: str) -> None:
    env = gym.make(name, device="simulator").unwrapped
    started = time.process_time()  # not of the wall: tests run side by side
    check_env(env)  # a warning is an error in this test suite
    assert time.process_time() - started < 2.0


def test_specs_can_be_written_down() -> None:
    for name in IDS:
        spec = gym.spec(name)
        assert spec.nondeterministic
        assert spec.max_episode_steps is None
        assert "KernelEnv" in spec.to_json()


def test_registering_again_is_silent() -> None:
    from mkb_env.registration import register_all

    register_all()


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_is_light_and_registers() -> None:
    heavy = run(
        "import sys, mkb_env, gymnasium; assert 'MKB/fused-attn-cute-v0' in gymnasium.registry; "
        "print([m for m in ('torch', 'cutlass', 'tvm', 'tvm_ffi', 'cuda') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_registration_takes_milliseconds() -> None:
    gymnasium, ours = run(
        "import time; t = time.process_time(); import gymnasium, msgspec; u = time.process_time(); import mkb_env; "
        "print(u - t, time.process_time() - u)"
    ).split()
    assert float(ours) < 0.3 * float(gymnasium)  # some 30 ms of 300 on an idle machine


def test_make_without_import() -> None:
    assert run(
        "import gymnasium as g; print(g.make('mkb_env:MKB/fused-attn-cute-v0', device='simulator').spec.id)"
    ) == ("MKB/fused-attn-cute-v0")


def test_exports() -> None:
    for name in mkb_env.__all__:
        assert getattr(mkb_env, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Kernel'"):
        _ = mkb_env.Kernel
