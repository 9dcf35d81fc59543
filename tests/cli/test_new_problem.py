"""A problem is one folder: made by `mkb new-problem`, refused until it is filled in, then known everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "problems" / "mlp_norm" / "rmsnorm_h128_qwen3_30b_bf16"
SLUG = "my_norm_bf16"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with three problems, so that the real catalog stays as it is."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("mkb_env", "agents"):
        shutil.copytree(ROOT / name, root / name, symlinks=True)
    (root / "problems").mkdir()
    for path in (ROOT / "problems").glob("*.py"):
        shutil.copy(path, root / "problems")
    shutil.copytree(MODEL, root / "problems" / "mlp_norm" / MODEL.name)
    return root


def mkb(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "MKB_RUNTIME_DIR": str(root / "run")}
    (root / "run").mkdir(mode=0o700, exist_ok=True)
    code = "from mkb_env.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_problem_is_one_folder(copy: Path) -> None:
    made = mkb(copy, "new-problem", SLUG, "--family", "mlp_norm")
    assert made.returncode == 0, made.stderr
    folder = copy / "problems" / "mlp_norm" / SLUG
    assert sorted(path.name for path in folder.iterdir()) == ["checks.py", "problem.py"]

    unfilled = mkb(copy, "check-problem", SLUG, "--json")
    assert unfilled.returncode == 1
    findings = {finding["check"]: finding for finding in json.loads(unfilled.stdout)["findings"]}
    assert findings["text"]["message"] == "checks.py and problem.py still say FILL IN"
    assert findings["reference, small"]["message"] == "NotImplementedError: FILL IN: write the reference"
    assert findings["draws, small"]["passed"] and findings["specs"]["passed"] and findings["workloads"]["passed"]

    again = mkb(copy, "new-problem", SLUG, "--family", "mlp_norm")
    assert again.returncode == 2 and "there is a problem called 'my_norm_bf16' already" in again.stderr

    for name in ("problem.py", "checks.py"):
        (folder / name).write_text((MODEL / name).read_text().replace("NUMBER = 36", "NUMBER = 99"))
    filled = mkb(copy, "check-problem", SLUG)
    assert filled.returncode == 0, filled.stdout + filled.stderr
    assert "ok   variants, small" in filled.stdout

    listed = json.loads(mkb(copy, "list", "--json").stdout)["problems"]
    assert [problem["slug"] for problem in listed] == [MODEL.name, SLUG]
    ids = subprocess.run(
        [sys.executable, "-c", "import gymnasium, mkb_env; print([i for i in gymnasium.registry if 'my-norm' in i])"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ids.stdout.strip() == "['MKB/my-norm-bf16-cute-v0', 'MKB/my-norm-bf16-tirx-v0']"
    mkb(copy, "stop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("norm_bf16", "--family", "norms"), "--family must be one of attention, kv_cache"),
        (("Norm", "--family", "moe"), "SLUG must be words in lower case joined by _"),
        (("../evil_slug", "--family", "moe"), "SLUG must be words in lower case joined by _"),
    ],
)
def test_misuse(copy: Path, arguments: tuple[str, ...], message: str) -> None:
    refused = mkb(copy, "new-problem", *arguments)
    assert refused.returncode == 2
    assert message in " ".join(refused.stderr.split())


def test_check_problem_refuses_other_devices(copy: Path) -> None:
    refused = mkb(copy, "check-problem", MODEL.name, "--device", "tpu")
    assert refused.returncode == 2
    assert "--device must be cpu, cuda or cuda:N, got 'tpu'" in refused.stderr
