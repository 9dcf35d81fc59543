"""The wheel holds what an installed copy needs, and installs without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "mkb_env/plan.py",
    "mkb_env/agents/scripted.py",
    "mkb_env/agents/demo/rmsnorm_cute.py",
    "mkb_env/dsl/contract_cute.txt",
    "mkb_env/dsl/contract_tirx.txt",
    "mkb_env/problems/contract.py",
    "mkb_env/problems/mlp_norm/rmsnorm_h128_qwen3_30b_bf16/problem.py",
    "mkb_env/problems/mlp_norm/rmsnorm_h128_qwen3_30b_bf16/cute.py",
    "mkb_env/recorder/driver/libcuda.so.1",
    "mkb_env/recorder/driver/libcudart.so.13",
    "mkb_env/recorder/driver/libmkb_cute_runtime.so",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"  # a build leaves files beside its sources
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("mkb_env", "agents", "problems"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    return path


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in NEEDED if name not in names]
    assert not [name for name in names if not name.startswith(("mkb_env/", "mkb_env-"))]
    assert "-py3-none-linux" in wheel.name or "-py3-none-manylinux" in wheel.name


def test_unpacked_it_finds_problems_and_libraries(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import mkb_env, gymnasium, pathlib\n"
        "from mkb_env.problems import catalog\n"
        "from mkb_env.recorder.libraries import TVM_LIBRARIES, CUTE_LIBRARY\n"
        "assert pathlib.Path(mkb_env.__file__).parent == pathlib.Path.cwd() / 'mkb_env', mkb_env.__file__\n"
        "assert all(path.exists() for path in (*TVM_LIBRARIES, CUTE_LIBRARY))\n"
        "print(len(catalog()), len([i for i in gymnasium.registry if i.startswith('MKB/')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    problems, ids = map(int, done.stdout.split())
    assert problems >= 3 and ids >= 2 * problems
