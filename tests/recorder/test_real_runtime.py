"""Recording where a real CUDA runtime is in the process first, as a CUDA build of torch brings it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from sources import TIRX

CODE = """
import ctypes, os, sys
from pathlib import Path
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from mkb_env.recorder import service
service.preload("")
from mkb_env import dsl
from mkb_env.plan import decode
from mkb_env.recorder.protocol import Call, OutputSpec, RecordRequest, TensorInput
from mkb_env.recorder.record import record
call = Call((TensorInput((4, 128), "bfloat16"),), (OutputSpec((4, 128), "bfloat16"),), False)
request = RecordRequest(Path("source.py").read_text(), "tirx", (call,))
recording = record(request, dsl.get("tirx"), Path.cwd(), lambda stage: None)
service.close()
print(recording.failure, [launch.grid for launch in decode(recording.plans[0]).launches], flush=True)
os._exit(0)  # a real runtime without a driver need not end well
"""


def test_tvm_calls_the_stand_ins_all_the_same(tmp_path: Path) -> None:
    runtime = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    if not runtime.exists():
        pytest.fail(f"{runtime} is missing: nvidia-cuda-runtime is one of this project's dependencies")
    (tmp_path / "source.py").write_text(TIRX)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(runtime)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "None [(4, 1, 1)]"


def test_the_stand_in_driver_comes_before_torch() -> None:
    """What looks for a driver finds the first library of that name; torch may bring the real one."""
    code = (
        "import sys\n"
        "from mkb_env.recorder import service\n"
        "from mkb_env.recorder.libraries import DRIVER_LIBRARY, load_driver\n"
        "load_driver()\n"
        "assert 'torch' not in sys.modules\n"
        "import ctypes\n"
        "assert ctypes.CDLL('libcuda.so.1')._handle == ctypes.CDLL(str(DRIVER_LIBRARY))._handle\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
