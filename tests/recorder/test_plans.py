"""What is recorded: launches, pointers, memory operations, geometry."""

import struct

import pytest
from sources import CUTE, INPUTS, OUTPUTS, ROWS, failure_of, plan_of, with_solve

from mkb_env.plan import Copy, Fill, Launch, Upload
from mkb_env.recorder.protocol import ScalarInput, TensorInput

BOTH = pytest.mark.parametrize("dsl", ["cute", "tirx"])
GEOMETRY = TensorInput((4,), "int32", struct.pack("<4i", 0, 3, 5, 9))


@BOTH
def test_launch_is_recorded(dsl: str) -> None:
    plan = plan_of(with_solve(dsl, "    y = torch.empty_like(x)\n    launch(x, y)\n    return y"), dsl)
    (launch,) = plan.launches
    assert launch.grid == (ROWS, 1, 1) and launch.block == (128, 1, 1)
    assert [(b.nbytes, b.input) for b in plan.buffers] == [(ROWS * 256, 0), (ROWS * 256, None)]
    pointers = {(p.buffer, p.addend) for param in launch.params for p in param.pointers}
    assert pointers == {(0, 0), (1, 0)}
    assert plan.outputs[0].buffer == 1
    image = plan.images[launch.image]
    assert f".entry {launch.kernel}" in image.ptx and image.cubin[:4] == b"\x7fELF"
    assert image.registers[launch.kernel] > 0


@BOTH
def test_pointer_into_a_view_keeps_its_offset(dsl: str) -> None:
    body = "    y = torch.empty(6, 128, dtype=x.dtype, device=x.device)\n    launch(x, y[2:])\n    return y[2:]"
    plan = plan_of(with_solve(dsl, body), dsl)
    assert {(p.buffer, p.addend) for param in plan.launches[0].params for p in param.pointers} == {(0, 0), (1, 512)}
    assert plan.outputs[0].offset == 512 and plan.outputs[0].shape == (ROWS, 128)


def test_memory_operations_become_steps() -> None:
    body = """
    y = torch.zeros_like(x)
    a = torch.full((3, 5), 7, dtype=torch.int32, device="cuda")
    b = x.float()
    c = b.t().contiguous()
    c.fill_(1.5)
    d = x.clone()
    d[1:3].copy_(x[:2])
    e = torch.tensor([1, 2, 3], dtype=torch.int64, device="cuda")
    a[0, :3].copy_(e)
    launch(d, y)
    return y
"""
    plan = plan_of(with_solve("cute", body), "cute")
    kinds = [type(step).__name__ for step in plan.steps]
    assert kinds == ["Fill", "Fill", "Copy", "Copy", "Fill", "Copy", "Copy", "Upload", "Copy", "Launch"]
    fills = [step for step in plan.steps if isinstance(step, Fill)]
    assert [fill.value for fill in fills] == [0, 7, 1.5]
    copies = [step for step in plan.steps if isinstance(step, Copy)]
    assert (copies[0].source.dtype, copies[0].target.dtype) == ("bfloat16", "float32")
    assert copies[1].source.shape == (128, ROWS) and copies[1].source.strides == (1, 128)
    assert copies[3].target.offset == 256 and copies[3].target.shape == (2, 128)
    (upload,) = [step for step in plan.steps if isinstance(step, Upload)]
    assert upload.data == struct.pack("<3q", 1, 2, 3)


def test_unused_constants_and_buffers_are_left_out() -> None:
    body = """
    torch.tensor([1, 2], device="cuda")
    torch.empty(1000, device="cuda")
    y = torch.empty_like(x)
    launch(x, y)
    return y
"""
    plan = plan_of(with_solve("cute", body), "cute")
    assert [type(step) for step in plan.steps] == [Launch] and len(plan.buffers) == 2


@BOTH
def test_geometry_can_be_read_and_computed_with(dsl: str) -> None:
    body = """
    lengths = lens[1:] - lens[:-1]
    assert lens.tolist() == [0, 3, 5, 9] and lens[-1].item() == 9 and int(lens[1]) == 3
    assert lengths.tolist() == [3, 2, 4] and int(lengths.max()) == 4 and lens.cpu().numpy().sum() == 17
    y = torch.empty_like(x)
    launch(x, y[: int(lengths.max())])
    return y
"""
    plan = plan_of(with_solve(dsl, body, arguments="x, lens"), dsl, (*INPUTS, GEOMETRY))
    assert plan.launches[0].grid == (4, 1, 1)


def test_scalars_arrive_as_scalars() -> None:
    body = (
        "    assert scale == 0.5 and type(scale) is float\n    y = torch.empty_like(x)\n    launch(x, y)\n    return y"
    )
    plan_of(with_solve("cute", body, arguments="x, scale"), "cute", (*INPUTS, ScalarInput(0.5)))


def test_target_device_answers() -> None:
    body = """
    from cutlass.utils import HardwareInfo
    assert x.is_cuda and x.device == torch.device("cuda", 0) and x.get_device() == 0 and not x.is_cpu
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(x.device).multi_processor_count == 132
    assert HardwareInfo().get_device_multiprocessor_count() == 132 and HardwareInfo().get_max_active_clusters(2) == 66
    assert torch.cuda.current_stream().cuda_stream == 0
    torch.cuda.synchronize()
    y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    assert y.device == x.device and y[1:].is_cuda and "cuda" in repr(y)
    launch(x, y)
    return y
"""
    plan_of(with_solve("cute", body), "cute")


def test_several_outputs_come_as_a_tuple() -> None:
    body = (
        "    y = torch.empty_like(x)\n    z = torch.empty_like(x)\n    launch(x, y)\n    launch(x, z)\n    return y, z"
    )
    plan = plan_of(with_solve("cute", body), "cute", outputs=(*OUTPUTS, *OUTPUTS))
    assert plan.output_tree.kind == "tuple" and len(plan.outputs) == 2 and len(plan.launches) == 2


def test_same_kernel_name_compiled_twice_keeps_each_its_image() -> None:
    source = CUTE.replace("* 2.0", "* FACTOR").replace("def launch(", "FACTOR = 2.0\n\ndef launch(")
    body = """
    global FACTOR
    y, z = torch.empty_like(x), torch.empty_like(x)
    launch(x, y)
    FACTOR = 3.0
    launch(x, z)
    return y, z
"""
    start = source.index("def solve")
    plan = plan_of(f"{source[:start]}def solve(x):\n{body}", "cute", outputs=(*OUTPUTS, *OUTPUTS))
    first, second = (plan.images[launch.image].ptx for launch in plan.launches)
    assert first != second


def test_recordings_do_not_see_each_other() -> None:
    body = """
    import builtins
    assert not hasattr(builtins, "left")
    builtins.left = 1
    y = torch.empty_like(x)
    launch(x, y)
    return y
"""
    source = with_solve("cute", body)
    assert plan_of(source, "cute") == plan_of(source, "cute")


def test_writing_an_input_is_refused() -> None:
    failure = failure_of(with_solve("cute", "    x.zero_()\n    return x"), "cute")
    assert failure.kind == "host_error" and "input 0" in failure.message and failure.location is not None
