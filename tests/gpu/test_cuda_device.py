"""The CUDA device on a real GPU: plans made by hand, from kernels compiled on the spot."""

import os
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from cuda_kernels import NoCompiler, compile_cuda

from mkb_env import plan as plans
from mkb_env.devices.base import DeviceFault
from mkb_env.devices.cuda import CudaDevice, available
from mkb_env.devices.launcher import Launcher
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
    TensorMap,
    TensorView,
    Upload,
)

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
N = 4096


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    reason = available()
    if reason:
        pytest.skip(reason)
    return CudaDevice()


@pytest.fixture(scope="module")
def arch(device: CudaDevice) -> str:
    major, minor = device.compute_capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@pytest.fixture(scope="module")
def cubin(arch: str) -> bytes:
    try:
        return compile_cuda(arch)[0]
    except NoCompiler as reason:
        pytest.skip(str(reason))


MakePlan = Callable[..., LaunchPlan]


@pytest.fixture(scope="module")
def make_plan(arch: str, cubin: bytes) -> MakePlan:
    """A validated plan over buffers, given as (nbytes, input position or None)."""

    def make(
        buffers: list[tuple[int, int | None]],
        steps: list[plans.Step],
        outputs: list[TensorView],
        image: Image | None = None,
    ) -> LaunchPlan:
        plan = LaunchPlan(
            version=1,
            dsl="cute",
            target=arch,
            buffers=tuple(Buffer(nbytes, position) for nbytes, position in buffers),
            images=(image or Image("", cubin),),
            steps=tuple(steps),
            outputs=tuple(outputs),
            output_tree=OutputTree("tuple", (OutputTree("tensor"),) * len(outputs)),
        )
        return plans.decode(plans.encode(plan))

    return make


def hopper(device: CudaDevice) -> None:
    if device.compute_capability < (9, 0):
        pytest.skip(f"clusters and TMA need compute capability 9.0, {device.name} has {device.compute_capability}")


def flat(buffer: int, count: int, dtype: str = "float32", offset: int = 0) -> TensorView:
    return TensorView(buffer, offset, (count,), (1,), dtype)


def pointer(buffer: int, addend: int = 0) -> Param:
    return Param(bytes(8), (Pointer(0, buffer, addend),))


def int32(value: int) -> Param:
    return Param(struct.pack("<i", value))


def launch(kernel: str, params: list[Param], grid: int = 1, block: int = 128, **more: object) -> Launch:
    return Launch(image=0, kernel=kernel, grid=(grid, 1, 1), block=(block, 1, 1), params=tuple(params), **more)  # type: ignore[arg-type]


def add_plan(make_plan: MakePlan, image: Image | None = None) -> LaunchPlan:
    step = launch("add", [pointer(0), pointer(1), pointer(2), int32(N)], N // 128)
    return make_plan([(4 * N, 0), (4 * N, 1), (4 * N, None)], [step], [flat(2, N)], image)


def one_output(make_plan: MakePlan, step: Launch, count: int = 1024, dtype: str = "float32") -> LaunchPlan:
    return make_plan([(4 * count, None)], [step], [flat(0, count, dtype)])


def random_pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N, device="cuda"), torch.randn(N, device="cuda")


def check_usable(device: CudaDevice, make_plan: MakePlan) -> None:
    a, b = random_pair()
    bound = device.load(add_plan(make_plan)).bind([a, b])
    bound.run()
    device.synchronize()
    assert torch.equal(bound.outputs[0], a + b)
    assert not device.broken


def test_device_describes_itself(device: CudaDevice) -> None:
    assert device.name == torch.cuda.get_device_name(0)
    assert not device.simulated
    assert device.memory_bytes > 1 << 30
    assert device.l2_bytes > 1 << 20
    versions = device.versions()
    assert versions["torch"] == torch.__version__
    assert versions["device"] == device.name
    assert versions["driver"][0].isdigit()
    assert float(versions["cuda_driver"]) >= 12.4
    device.reset_persisting_l2()


def test_kernel_runs_on_poisoned_buffers_and_fresh_inputs(device: CudaDevice, make_plan: MakePlan) -> None:
    loaded = device.load(add_plan(make_plan))
    (kernel,) = loaded.kernels
    assert (kernel.name, kernel.grid, kernel.block) == ("add", (N // 128, 1, 1), (128, 1, 1))
    assert kernel.registers is not None and kernel.registers > 0
    assert (kernel.spill_bytes, kernel.shared_bytes) == (0, 0)
    for _ in range(3):
        a, b = random_pair()
        bound = loaded.bind([a, b])
        bound.poison()
        assert bound.outputs[0].isnan().all()
        bound.run()
        device.synchronize()
        assert torch.equal(bound.outputs[0], a + b)
    assert loaded.estimate_us() is None
    loaded.close()
    loaded.close()
    with pytest.raises(ValueError, match="closed"):
        bound.run()
    with pytest.raises(ValueError, match="closed"):
        loaded.bind([a, b])


def test_dynamic_shared_memory_of_several_sizes_in_one_plan(device: CudaDevice, make_plan: MakePlan) -> None:
    big = min(device.shared_limit // 4, 50000)
    assert big * 4 > 48 << 10
    steps: list[plans.Step] = [
        launch("reverse", [pointer(0), pointer(1), int32(big)], block=1024, shared_bytes=4 * big),
        launch("reverse", [pointer(0), pointer(2), int32(100)], shared_bytes=400),
    ]
    plan = make_plan([(4 * big, 0), (4 * big, None), (400, None)], steps, [flat(1, big), flat(2, 100)])
    values = torch.randn(big, device="cuda")
    bound = device.load(plan).bind([values])
    bound.run()
    device.synchronize()
    assert torch.equal(bound.outputs[0], values.flip(0))
    assert torch.equal(bound.outputs[1], values[:100].flip(0))


@pytest.mark.parametrize("size", [2, 16])
def test_clusters_exchange_shared_memory(device: CudaDevice, make_plan: MakePlan, size: int) -> None:
    hopper(device)
    step = launch("exchange", [pointer(0)], grid=32, block=64, cluster=(size, 1, 1))
    bound = device.load(one_output(make_plan, step, 32, "int32")).bind([])
    bound.run()
    device.synchronize()
    assert bound.outputs[0].tolist() == [(index ^ 1) * 100 + size for index in range(32)]


def test_tensor_map_is_encoded_for_the_bound_address(device: CudaDevice, make_plan: MakePlan) -> None:
    hopper(device)
    float32, no_swizzle = 7, 0
    box = TensorMap(
        offset=0, dtype=float32, buffer=0, addend=0, dims=(64, 16), strides=(256,), box=(32, 8),
        element_strides=(1, 1), interleave=0, swizzle=no_swizzle, l2_promotion=0, oob_fill=0,
    )  # fmt: skip
    step = launch("load_box", [Param(bytes(128), (), (box,)), pointer(1), int32(32), int32(8)], block=256)
    loaded = device.load(make_plan([(4096, 0), (1024, None)], [step], [TensorView(1, 0, (8, 32), (32, 1), "float32")]))
    for _ in range(2):
        matrix = torch.randn(16, 64, device="cuda")
        bound = loaded.bind([matrix])
        bound.run()
        device.synchronize()
        assert torch.equal(bound.outputs[0], matrix[8:, 32:])


def test_refused_tensor_map_says_what_was_asked(device: CudaDevice, make_plan: MakePlan) -> None:
    hopper(device)
    box = TensorMap(
        offset=0, dtype=7, buffer=0, addend=4, dims=(64, 16), strides=(256,), box=(32, 8),
        element_strides=(1, 1), interleave=0, swizzle=0, l2_promotion=0, oob_fill=0,
    )  # fmt: skip
    step = launch("load_box", [Param(bytes(128), (), (box,)), pointer(0), int32(0), int32(0)], block=256)
    with pytest.raises(DeviceFault, match=r"refuses the tensor map with dimensions \[64, 16\]") as caught:
        device.load(one_output(make_plan, step, 2048)).bind([])
    assert (caught.value.stage, caught.value.kernel) == ("launch_error", "load_box")
    check_usable(device, make_plan)


def test_cooperative_grid(device: CudaDevice, make_plan: MakePlan) -> None:
    blocks = device.multiprocessors
    count = 1 << 20
    step = launch("meet", [pointer(0), pointer(0, 256)], blocks, 32, cooperative=True)
    zero = Fill(flat(0, 1, "int32"), 0)
    plan = make_plan([(4 * count, None)], [zero, step], [flat(0, blocks, "int32", 256)])
    bound = device.load(plan).bind([])
    bound.run()
    device.synchronize()
    assert bound.outputs[0].tolist() == list(range(1, blocks + 1))
    step = launch("meet", [pointer(0), pointer(0, 256)], 65536, 32, cooperative=True)
    with pytest.raises(DeviceFault, match="cooperative grid of 65536 blocks must be resident") as caught:
        device.load(make_plan([(4 * count, None)], [zero, step], [flat(0, 1)]))
    assert caught.value.stage == "launch_error"


def test_programmatic_launches_keep_their_order(device: CudaDevice, make_plan: MakePlan) -> None:
    """The kernels never trigger early, so each starts after the one before has ended."""
    params = [pointer(0), pointer(1), pointer(1), int32(N)]
    steps = [launch("add", params, N // 128, programmatic=number > 0) for number in range(4)]
    loaded = device.load(make_plan([(4 * N, 0), (4 * N, None)], [Fill(flat(1, N), 0.0), *steps], [flat(1, N)]))
    ones = torch.ones(N, device="cuda")
    bound = loaded.bind([ones])
    bound.run()
    device.synchronize()
    assert torch.equal(bound.outputs[0], ones * 4)


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32"]
NARROW = ["float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", DTYPES + NARROW)
def test_fill_copy_and_upload_match_torch(device: CudaDevice, make_plan: MakePlan, dtype: str) -> None:
    """Strided fill, strided copy of equal dtypes, and an upload at an offset, against the same in torch on the CPU."""
    size = plans.DTYPE_BYTES[dtype]
    torch_dtype = getattr(torch, dtype)
    strided = TensorView(0, 8 * size, (4, 3), (8, 2), dtype)
    data = bytes(range(1, 17))
    steps: list[plans.Step] = [
        Fill(flat(0, 64 * size, "uint8"), 0),
        Fill(strided, 1),
        Upload(flat(0, 16, "uint8", 48 * size), data),
        Copy(TensorView(1, 0, (4, 3), (1, 4), dtype), strided),
    ]
    plan = make_plan(
        [(64 * size, None), (12 * size, None)], steps, [flat(0, 64 * size, "uint8"), flat(1, 12 * size, "uint8")]
    )
    bound = device.load(plan).bind([])
    bound.poison()
    bound.run()
    device.synchronize()
    want = torch.zeros(64 * size, dtype=torch.uint8)
    one = torch.ones(1, dtype=torch_dtype).view(torch.uint8)
    for row in range(4):
        for column in range(3):
            start = (8 + 8 * row + 2 * column) * size
            want[start : start + size] = one
    want[48 * size : 48 * size + 16] = torch.tensor(list(data), dtype=torch.uint8)
    assert bound.outputs[0].tolist() == want.tolist()
    copied = torch.tensor(
        [
            want[(8 + 8 * row + 2 * column) * size : (9 + 8 * row + 2 * column) * size].tolist()
            for column in range(3)
            for row in range(4)
        ],
        dtype=torch.uint8,
    )
    assert bound.outputs[1].tolist() == copied.flatten().tolist()


@pytest.mark.parametrize("target", ["bfloat16", "float16", "int32"])
def test_casting_copy_rounds_like_torch(device: CudaDevice, make_plan: MakePlan, target: str) -> None:
    size = plans.DTYPE_BYTES[target]
    plan = make_plan([(4 * N, 0), (size * N, None)], [Copy(flat(1, N, target), flat(0, N))], [flat(1, N, target)])
    values = torch.randn(N, device="cuda") * 100
    bound = device.load(plan).bind([values])
    bound.run()
    device.synchronize()
    assert torch.equal(bound.outputs[0].cpu(), values.cpu().to(getattr(torch, target)))


def mixed_plan(make_plan: MakePlan) -> LaunchPlan:
    """A plan of every kind of step that computes (input + uploaded) + 2."""
    uploaded = struct.pack(f"<{N}f", *range(N))
    grid = N // 128
    steps: list[plans.Step] = [
        Upload(flat(1, N), uploaded),
        Fill(flat(2, N), 2.0),
        launch("add", [pointer(0), pointer(1), pointer(1), int32(N)], grid),
        launch("add", [pointer(1), pointer(2), pointer(2), int32(N)], grid),
        Copy(flat(3, N), flat(2, N)),
    ]
    return make_plan([(4 * N, 0), (4 * N, None), (4 * N, None), (4 * N, None)], steps, [flat(3, N)])


def test_run_can_be_captured_in_a_graph(device: CudaDevice, make_plan: MakePlan) -> None:
    loaded = device.load(mixed_plan(make_plan))
    a = torch.randn(N, device="cuda")
    bound = loaded.bind([a])
    torch.zeros(N, dtype=torch.int32, device="cuda").fill_(1)  # torch's own kernels load lazily, ours must not
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.run()
    for _ in range(2):
        a.copy_(torch.randn(N, device="cuda"))
        bound.poison()
        graph.replay()
        device.synchronize()
        assert torch.equal(bound.outputs[0], a + torch.arange(N, device="cuda") + 2)
    bound.poison()
    bound.run()
    device.synchronize()
    assert torch.equal(bound.outputs[0], a + torch.arange(N, device="cuda") + 2)


def test_run_follows_the_current_stream(device: CudaDevice, make_plan: MakePlan) -> None:
    a, b, late = *random_pair(), torch.randn(N, device="cuda")
    bound = device.load(add_plan(make_plan)).bind([a, b])
    bound.run()
    device.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        late.normal_()
        device.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # tens of milliseconds: any other stream would read `a` too early
            a.copy_(late)
            bound.run()
        stream.synchronize()
        assert torch.equal(bound.outputs[0], late + b)


def test_host_cost_of_a_launch(device: CudaDevice, make_plan: MakePlan) -> None:
    bound = device.load(add_plan(make_plan)).bind(random_pair())
    samples = []
    for _ in range(300):
        begin = time.perf_counter()
        bound.run()
        samples.append((time.perf_counter() - begin) * 1e6)
    device.synchronize()
    median = statistics.median(samples)
    print(f"host cost of one launch: {median:.1f} us")
    assert median < 50


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            launch("add", [pointer(0), pointer(0), pointer(0), Param(bytes(8))]),
            "parameter 3 has 4 bytes, the plan gives 8",
        ),
        (launch("add", [pointer(0), pointer(0), pointer(0)]), "takes 4 parameters, the plan gives 3"),
        (launch("add", [pointer(0)] * 5), "takes 4 parameters, the plan gives 5"),
        (launch("subtract", [pointer(0)]), "no such kernel"),
        (launch("at_most_64_threads", [pointer(0)]), "block of 128 threads is too large"),
        (
            launch("static_shared", [pointer(0)], shared_bytes=plans.MAX_SHARED_BYTES),
            "static and 232448 of dynamic shared",
        ),
    ],
    ids=["size", "missing", "extra", "unknown", "threads", "shared"],
)
def test_launches_that_cannot_work_are_refused(
    device: CudaDevice, make_plan: MakePlan, step: Launch, words: str
) -> None:
    with pytest.raises(DeviceFault, match=words) as caught:
        device.load(one_output(make_plan, step))
    assert (caught.value.stage, caught.value.kernel) == ("launch_error", step.kernel)
    check_usable(device, make_plan)


def test_inputs_are_checked(device: CudaDevice, make_plan: MakePlan) -> None:
    loaded = device.load(add_plan(make_plan))
    a, b = random_pair()
    wrong: list[tuple[list[torch.Tensor | bool | int | float], str]] = [
        ([a], "reads input 1, but 1 inputs were given"),
        ([a, 3.0], "input 1 must be a tensor, got float"),
        ([a, b.cpu()], "input 1 must be contiguous and on cuda:0, got a tensor on cpu"),
        ([a, torch.randn(2 * N, device="cuda")[::2]], "not contiguous"),
        ([a, b[:-1]], f"input 1 must have {4 * N} bytes as recorded, got {4 * N - 4}"),
    ]
    for inputs, words in wrong:
        with pytest.raises(ValueError, match=words):
            loaded.bind(inputs)


def test_out_of_memory_is_a_launch_error_and_leaves_the_device_usable(device: CudaDevice, make_plan: MakePlan) -> None:
    plan = add_plan(make_plan)
    huge = msgspec.structs.replace(plan, buffers=(*plan.buffers, Buffer(1 << 42)))
    with pytest.raises(DeviceFault, match="out of device memory") as caught:
        device.load(huge).bind(random_pair())
    assert caught.value.stage == "launch_error"
    check_usable(device, make_plan)


def test_damaged_and_foreign_images_are_refused(device: CudaDevice, make_plan: MakePlan, cubin: bytes) -> None:
    for damaged in (cubin[:-1], cubin[:100], b"not an image"):
        with pytest.raises(DeviceFault, match="image 0 is damaged") as caught:
            device.load(add_plan(make_plan, Image("", damaged)))
        assert caught.value.stage == "launch_error"
    foreign = "sm_90" if device.compute_capability[0] == 8 else "sm_80"
    with pytest.raises(DeviceFault, match="does not load on") as caught:
        device.load(add_plan(make_plan, Image("", compile_cuda(foreign)[0])))
    assert caught.value.stage == "launch_error"
    assert device.name in caught.value.message
    check_usable(device, make_plan)


def test_ptx_is_compiled_by_the_driver_or_reported_unsupported(
    device: CudaDevice, make_plan: MakePlan, arch: str
) -> None:
    text, compiler = compile_cuda(arch, ptx=True)
    ptx = text.decode().rstrip("\0")
    driver = tuple(int(part) for part in device.driver.version().split("."))
    if compiler <= driver:
        a, b = random_pair()
        bound = device.load(add_plan(make_plan, Image(ptx, b""))).bind([a, b])
        bound.run()
        device.synchronize()
        assert torch.equal(bound.outputs[0], a + b)
    version = ptx.split(".version ")[1].split()[0]
    future = ptx.replace(f".version {version}", ".version 99.9")
    with pytest.raises(DeviceFault) as caught:
        device.load(add_plan(make_plan, Image(future, b"")))
    assert caught.value.stage == "unsupported"
    with pytest.raises(DeviceFault) as caught:
        device.load(add_plan(make_plan, Image(ptx.replace("add.f32", "add.f33"), b"")))
    assert caught.value.stage in ("launch_error", "unsupported" if compiler > driver else "launch_error")
    check_usable(device, make_plan)


@pytest.fixture(scope="module")
def launcher(device: CudaDevice) -> Iterator[Launcher]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        with Launcher("gpu_handlers:run_plan") as started:
            yield started


def good_job(make_plan: MakePlan) -> bytes:
    return plans.encode(one_output(make_plan, launch("static_shared", [pointer(0)], block=1024)))


def check_launcher(launcher: Launcher, make_plan: MakePlan) -> None:
    assert launcher.call(good_job(make_plan), 60) == struct.pack("<1024f", *[1.0] * 1024)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [("out_of_bounds", "CUDA_ERROR_ILLEGAL_ADDRESS"), ("misaligned", "CUDA_ERROR_MISALIGNED_ADDRESS")],
)
def test_a_fault_costs_one_process_and_the_next_job_works(
    launcher: Launcher, make_plan: MakePlan, kernel: str, words: str
) -> None:
    check_launcher(launcher, make_plan)
    starts = launcher.starts
    with pytest.raises(DeviceFault, match=words) as caught:
        launcher.call(plans.encode(one_output(make_plan, launch(kernel, [pointer(0)]))), 60)
    assert (caught.value.stage, caught.value.kernel) == ("launch_error", kernel)
    check_launcher(launcher, make_plan)
    assert launcher.starts == starts + 1  # the context was lost: the child reported it and was replaced


def test_refused_plans_keep_the_process(launcher: Launcher, make_plan: MakePlan, device: CudaDevice) -> None:
    check_launcher(launcher, make_plan)
    starts = launcher.starts
    with pytest.raises(DeviceFault, match="takes 4 parameters") as caught:
        launcher.call(plans.encode(one_output(make_plan, launch("add", [pointer(0)]))), 60)
    assert caught.value.stage == "launch_error"
    check_launcher(launcher, make_plan)
    assert launcher.starts == starts
    assert launcher.ready is not None and launcher.ready.device == device.name


def test_an_endless_kernel_is_killed_and_the_next_job_works(launcher: Launcher, make_plan: MakePlan) -> None:
    check_launcher(launcher, make_plan)
    job = plans.encode(one_output(make_plan, launch("forever", [pointer(0)])))
    with pytest.raises(DeviceFault, match=r"no answer within 2 s \(in stage run\)") as caught:
        launcher.call(job, 2)
    assert caught.value.stage == "timeout"
    check_launcher(launcher, make_plan)
