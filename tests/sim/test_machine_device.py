"""Plans on the simulator: memory steps, bindings, poison, estimates, variables of modules."""

from __future__ import annotations

import msgspec
import pytest
import torch
from simulated import plan_of, ptx_of, run_ptx

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator import SimulatorDevice
from mkb_env.plan import (
    Buffer,
    Copy,
    Fill,
    Image,
    Launch,
    LaunchPlan,
    OutputTree,
    Param,
    Pointer,
    TensorView,
    Upload,
    decode,
    encode,
)

SCALE = 'extern "C" __global__ void k(const float* x, float* y, float f) { y[threadIdx.x] = f * x[threadIdx.x]; }'


def test_memory_steps_and_a_launch_in_order() -> None:
    """Fill a workspace, scale it into another, cast that to bf16 through a strided view, upload constants."""
    first, second = TensorView(1, 0, (64,), (1,), "float32"), TensorView(2, 256, (8, 8), (1, 8), "float32")
    launch = Launch(
        0, "k", (1, 1, 1), (64, 1, 1),
        (Param(bytes(8), (Pointer(0, 1, 0),)), Param(bytes(8), (Pointer(0, 2, 256),)), Param(b"\0\0\0\x40")),
    )  # fmt: skip
    plan = LaunchPlan(
        version=1,
        dsl="cute",
        target="sm_90a",
        buffers=(Buffer(256, 0), Buffer(256), Buffer(512), Buffer(128), Buffer(12)),
        images=(Image(ptx_of(SCALE), b"", {"k": 10}),),
        steps=(
            Fill(first, 1.5),
            Copy(TensorView(1, 0, (32,), (1,), "float32"), TensorView(0, 128, (32,), (1,), "float32")),
            launch,
            Copy(TensorView(3, 0, (8, 8), (8, 1), "bfloat16"), second),
            Upload(TensorView(4, 0, (3,), (1,), "int32"), b"\1\0\0\0\2\0\0\0\xff\xff\xff\xff"),
        ),
        outputs=(TensorView(3, 0, (8, 8), (8, 1), "bfloat16"), TensorView(4, 0, (3,), (1,), "int32")),
        output_tree=OutputTree("tuple", (OutputTree("tensor"), OutputTree("tensor"))),
    )
    loaded = SimulatorDevice().load(decode(encode(plan)))
    assert loaded.estimate_us() is None
    (kernel,) = loaded.kernels
    assert (kernel.name, kernel.block, kernel.registers, kernel.shared_bytes) == ("k", (64, 1, 1), 10, 0)
    x = torch.arange(64.0)
    bound = loaded.bind([x])
    bound.poison()
    assert bound.outputs[0].isnan().all() and bound.outputs[1].tolist() == [-1] * 3
    bound.run()
    want = 2 * torch.cat((x[32:], torch.full((32,), 1.5)))
    assert torch.equal(bound.outputs[0], want.view(8, 8).T.bfloat16())
    assert bound.outputs[1].tolist() == [1, 2, -1]
    assert torch.equal(x, torch.arange(64.0))
    estimate = loaded.estimate_us()
    assert estimate is not None and 5 + 5 * 2.5 <= estimate < 40


def test_bindings_differ_in_address_and_share_no_workspace() -> None:
    source = 'extern "C" __global__ void k(long long* o, const int* x) { o[0] = (long long)x; o[1] = (long long)o; }'
    seen = set()
    plan, tensors = plan_of(
        ptx_of(source), (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)), block=1
    )
    loaded = SimulatorDevice().load(plan)
    for _ in range(5):
        loaded.bind(tensors).run()
        assert tensors[0][0] % 256 == 0
        seen.add(tuple(tensors[0].tolist()))
    assert len(seen) == 5


def test_variables_of_a_module_keep_their_value_between_launches() -> None:
    source = """__device__ int counter = 40; __constant__ float weights[3] = {1.0f, 2.5f, -3.0f};
        __device__ const float* where = weights + 1;
        extern "C" __global__ void k(float* o) { counter++; o[0] = counter; o[1] = *where; o[2] = weights[2]; }"""
    out = torch.zeros(3)
    plan, tensors = plan_of(ptx_of(source), (out,), block=1)
    bound = SimulatorDevice().load(plan).bind(tensors)
    bound.run()
    bound.run()
    assert out.tolist() == [42.0, 2.5, -3.0]


def test_one_access_may_reach_several_buffers() -> None:
    source = """extern "C" __global__ void k(int* o, const int* a, const int* b) {
        const int* p = threadIdx.x & 1 ? a : b; int v = p[threadIdx.x];
        (threadIdx.x & 2 ? o : (int*)p)[threadIdx.x] = v + 1000; }"""
    out, a, b = (torch.arange(64, dtype=torch.int32) + i for i in (0, 100, 200))
    run_ptx(ptx_of(source), out, a, b, block=64)
    base = torch.arange(64)
    value = torch.where(base % 2 == 1, base + 100, base + 200)
    assert torch.equal(out.long(), torch.where(base & 2 > 0, value + 1000, base))
    assert torch.equal(a.long(), torch.where((base & 3) == 1, value + 1000, base + 100))
    assert torch.equal(b.long(), torch.where((base & 3) == 0, value + 1000, base + 200))


def test_bindings_and_images_that_do_not_fit() -> None:
    plan, tensors = plan_of(ptx_of(SCALE), (torch.zeros(64), torch.zeros(64), 2.0), block=64)
    loaded = SimulatorDevice().load(plan)
    with pytest.raises(DeviceFault, match="input 1 has 128 bytes, the plan states 256"):
        loaded.bind([tensors[0], torch.zeros(32)])
    with pytest.raises(DeviceFault, match="must be contiguous"):
        loaded.bind([tensors[0], torch.zeros(64, 2)[:, 0]])
    with pytest.raises(DeviceFault, match="holds no PTX"):
        SimulatorDevice().load(msgspec.structs.replace(plan, images=(Image("", b"\x7fELF"),)))
    with pytest.raises(DeviceFault, match="cannot be read: PTX line 4"):
        SimulatorDevice().load(
            msgspec.structs.replace(plan, images=(Image(".version 8.0\n.target sm_90a\n\n.nonsense x;", b""),))
        )


@pytest.mark.parametrize(("stride", "least"), [(1, 1.0), (32, 6.0)])
def test_the_estimate_knows_uncoalesced_accesses(stride: int, least: float) -> None:
    """64 MB read by sectors: a stride of 32 floats asks for eight times as many."""
    source = f"""extern "C" __global__ void k(float* o, const float* x) {{ int t = blockIdx.x * 256 + threadIdx.x;
        o[t] = x[(long long)t * {stride} % (1 << 22)]; }}"""
    times = []
    for actual in (1, stride):
        x, out = torch.zeros(1 << 22), torch.zeros(1 << 19)
        plan, tensors = plan_of(
            ptx_of(source.replace(f"t * {stride} %", f"t * {actual} %")), (out, x), grid=2048, block=256
        )
        loaded = SimulatorDevice().load(plan)
        loaded.bind(tensors).run()
        estimate = loaded.estimate_us()
        assert estimate is not None
        times.append(estimate - 7.5)
    assert times[1] >= 0.5 * least * times[0]
