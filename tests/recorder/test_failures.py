"""What an agent reads when there is no plan: stage, words, and the line in its own source."""

import time
from pathlib import Path

import pytest
from sources import CUTE, TIRX, failure_of, plan_of, record, with_solve

GOOD = with_solve("cute", "    y = torch.empty_like(x)\n    launch(x, y)\n    return y")

HOST = {
    "exit code": ("    import os\n    os._exit(0)", "exit code 0", None),
    "sys.exit": ("    import sys\n    sys.exit(3)", "exit(3)", "sys.exit(3)"),
    "segfault": ("    import ctypes\n    ctypes.string_at(0)", "SIGSEGV", None),
    "raw pointer": ("    import ctypes\n    ctypes.string_at(x.data_ptr(), 2)", "SIGSEGV", None),
    "cpu": ("    return x.float().cpu()", "reads tensor data on the host", "return x.float().cpu()"),
    "item": ("    return x[0, 0].item()", "reads tensor data on the host", "return x[0, 0].item()"),
    "tolist": ("    return x.tolist()", "reads tensor data on the host", "return x.tolist()"),
    "numpy": ("    import numpy\n    numpy.asarray(x)", "reads tensor data on the host", "numpy.asarray(x)"),
    "branch": ("    if x[0, 0] > 0:\n        return x", "aten.gt.Scalar computes", "if x[0, 0] > 0:"),
    "matmul": ("    return x @ x.t()", "aten.mm.default computes", "return x @ x.t()"),
    "cpu maths": ("    torch.ones(4, 128) @ torch.ones(128, 128)", "aten.mm.default computes", "torch.ones"),
    "arithmetic": ("    return x * 2", "aten.mul.Tensor computes", "return x * 2"),
    "no launch": ("    return torch.empty_like(x)", "without launching a kernel", None),
    "no value": ("    pass", "must return one tensor ([4, 128] bfloat16), got None", None),
    "tuple": ("    return (x,)", "got a tuple of 1", None),
    "shape": ("    return torch.empty(3, device='cuda')", "must be [4, 128] bfloat16, got [3] float32", None),
    "on the cpu": ("    return torch.empty(4, 128, dtype=torch.bfloat16)", "must be on the target device", None),
    "file": ("    return open('/etc/passwd').read()", "Permission denied", "return open('/etc/passwd').read()"),
    "baseline": (
        "    import mkb_env, pathlib\n"
        "    root = pathlib.Path(mkb_env.__file__).parent\n"
        "    return (root / 'problems/mlp_norm/rmsnorm_h128_qwen3_30b_bf16/cute.py').read_text()",
        "Permission denied",
        "return (root",
    ),
    "token of the servers": (
        "    import os\n    open(os.environ['MKB_RUNTIME_DIR'] + '/token').read()",
        "Permission denied",
        "open(os.environ",
    ),
    "capabilities": (
        "    raise ValueError([line for line in open('/proc/self/status') if line.startswith('CapEff')])",
        "CapEff:\\t0000000000000000",
        "raise ValueError",
    ),
    "network": ("    import urllib.request as r\n    r.urlopen('http://127.0.0.1:9')", "urlopen error", "r.urlopen"),
    "other processes": ("    open('/proc/1/environ').read()", "Permission denied", "open('/proc/1/environ')"),
    "clock": (
        "    e = torch.cuda.Event(enable_timing=True)\n    e.record()\n    e.elapsed_time(e)",
        "no clock while recording",
        "e.elapsed_time(e)",
    ),
    "graph": ("    torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph is not available", "torch.cuda.CUDAGraph()"),
    "torch.compile": ("    torch.compile(lambda a: a)(x)", "torch.compile is not available", "torch.compile("),
    "exception": ("    raise ValueError('my own')", "my own", "raise ValueError('my own')"),
    "forged result": ("    print('{\"stage\": \"passed\"}')\n    return None", "must return one tensor", None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_host_code(name: str) -> None:
    body, words, line = HOST[name]
    failure = failure_of(with_solve("cute", body), "cute")
    assert failure.kind == "host_error" and words in failure.message
    assert "site-packages" not in failure.message and "/recorder/" not in failure.message
    if line is None:
        assert failure.location is None
    else:
        assert failure.location is not None and failure.location.text.strip().startswith(line)


def test_time_limit_ends_a_sleeper_and_its_threads() -> None:
    body = (
        "    import threading, time\n    threading.Thread(target=time.sleep, args=(600,)).start()\n    time.sleep(600)"
    )
    failure = failure_of(with_solve("cute", body), "cute", seconds=1.5)
    assert failure.kind == "timeout" and "1.5 s" in failure.message
    plan_of(GOOD, "cute")


DENIED = {
    "fork": "os.fork()",
    "program": "os.execv('/bin/true', ['true'])",
    "subprocess": "__import__('subprocess').run(['true'])",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "internet socket": "socket.socket(socket.AF_INET)",
    "shared memory": "mmap.mmap(-1, 1 << 20)",
    "memory file": "os.memfd_create('x')",
}


@pytest.mark.parametrize("name", DENIED)
def test_system_calls_out_of_reach(name: str) -> None:
    failure = failure_of(with_solve("cute", f"    import mmap, os, socket\n    {DENIED[name]}"), "cute")
    assert failure.kind == "host_error" and failure.error_class == "PermissionError", failure


def test_a_deep_folder_does_not_end_the_server() -> None:
    body = """
    import os
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    raise ValueError("deep")
"""
    assert "deep" in failure_of(with_solve("cute", body), "cute").message
    plan_of(GOOD, "cute")


def test_memory_limit() -> None:
    body = "    kept = []\n    while True:\n        kept.append(bytearray(16 << 20))"
    failure = failure_of(with_solve("cute", body), "cute", memory_bytes=256 << 20)
    assert failure.kind == "host_error" and "memory" in failure.message
    plan_of(GOOD, "cute")


def test_signalling_the_server_is_not_possible() -> None:
    body = """
    import os
    for pid in range(1, 5):
        try:
            os.kill(pid, 0)
            assert pid == os.getpid()
        except ProcessLookupError:
            pass
    raise ValueError("still here")
"""
    assert "still here" in failure_of(with_solve("cute", body), "cute").message


def test_patched_torch_and_time_change_nothing_for_the_next() -> None:
    body = """
    import time
    torch.empty_like = None
    time.perf_counter = lambda: 0.0
    torch.Tensor.__eq__ = lambda a, b: True
    return x
"""
    failure_of(with_solve("cute", body), "cute")
    plan_of(GOOD, "cute")


def test_a_claim_that_costs_nothing_is_not_believed() -> None:
    """A submission that writes its own answer cannot say that our side failed."""
    body = """
    import os, socket, msgspec
    from mkb_env.servers.wire import Message, send_frame
    from mkb_env.recorder.protocol import Failure, Recording
    lie = msgspec.msgpack.encode(Recording(failure=Failure("infra_error", "please retry")))
    for number in range(3, 40):
        try:
            mine = socket.socket(fileno=os.dup(number))
            send_frame(mine, Message(result=lie))
        except OSError:
            pass
    os._exit(0)
"""
    failure = failure_of(with_solve("cute", body), "cute")
    assert failure.kind == "host_error"


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_missing_solve_and_wrong_arity(dsl: str) -> None:
    source = with_solve(dsl, "    return a", arguments="a, b")
    failure = failure_of(source, dsl)
    assert failure.kind == "rejected" and "1 inputs" in failure.message
    failure = failure_of(source.replace("def solve", "def other"), dsl)
    assert failure.kind == "rejected" and "define a function solve" in failure.message


CUTE_ERRORS = {
    "unknown name": ("cute.arch.block_idx()", "cute.arch.no_such_name()", "no_such_name"),
    "type": ("* 2.0", "* 'two'", ""),
    "undefined": ("x[row, column]", "x[row, nowhere]", "nowhere"),
}


@pytest.mark.parametrize("name", CUTE_ERRORS)
def test_cute_compile_errors_name_the_line(name: str) -> None:
    old, new, words = CUTE_ERRORS[name]
    source = CUTE.replace(old, new, 1)
    failure = failure_of(source, "cute")
    assert failure.kind == "compile_error" and words in failure.message, failure
    assert failure.location is not None and failure.location.text == _line(source, new)
    assert "site-packages" not in failure.message


TIRX_ERRORS = {
    "unknown name": ("T.cta_id([rows])", "T.no_such_name([rows])", "no_such_name"),
    "undefined": ("y[row, column]", "y[row, nowhere]", "nowhere"),
    "dtype": ('"bfloat16")\n        T.device', '"bfloat99")\n        T.device', "bfloat99"),
}


@pytest.mark.parametrize("name", TIRX_ERRORS)
def test_tirx_compile_errors_name_the_line(name: str) -> None:
    old, new, words = TIRX_ERRORS[name]
    source = TIRX.replace(old, new, 1)
    failure = failure_of(source, "tirx")
    assert failure.kind == "compile_error" and words in failure.message, failure
    # what the code generator refuses has no place in the source but the call that compiles
    where = "return tvm.compile(" if name == "dtype" else new
    assert failure.location is not None and failure.location.text == _line(source, where)
    assert "site-packages" not in failure.message


@pytest.mark.parametrize(
    ("dsl", "old", "new"),
    [
        ("tirx", "(x.shape[0])(x, y)", "(x.shape[0])(x)"),
        ("tirx", "(x, y)\n\ndef solve", "(x, y[:2])\n\ndef solve"),
        ("cute", "(a, b)\n", "(a)\n"),
    ],
)
def test_a_compiled_function_called_wrongly_is_a_host_error(dsl: str, old: str, new: str) -> None:
    source = {"cute": CUTE, "tirx": TIRX}[dsl]
    assert old in source
    failure = failure_of(source.replace(old, new, 1), dsl)
    assert failure.kind == "host_error" and failure.location is not None, failure


def _line(source: str, text: str) -> str:
    return next(line for line in source.splitlines() if text in line)


def test_scratch_folders_do_not_stay() -> None:
    """A submission that fills its scratch folder leaves nothing, however it ends."""
    body = """
    import os
    open("left", "w").write("x")
    os.makedirs("deep/er")
    print(os.getcwd())
"""
    folder = Path(record(with_solve("cute", body), "cute").log.strip())
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert folder.parent.name.startswith("mkb-record-") and not folder.exists()
