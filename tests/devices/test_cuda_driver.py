"""What of the CUDA device can be checked without a GPU: structures, image headers, fills, and what an import does."""

import ctypes
import struct
import subprocess
import sys

import pytest
import torch
from cuda.bindings import driver as reference
from cuda.bindings import nvrtc

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.cuda import _bit_pattern, available
from mkb_env.devices.cuda_driver import LaunchAttribute, LaunchConfig, check_image, launch_config
from mkb_env.plan import DTYPE_BYTES


def memory(structure: object, size: int) -> bytes:
    return ctypes.string_at(structure.getPtr(), size)  # type: ignore[attr-defined]


def test_launch_configuration_has_the_drivers_layout() -> None:
    """Byte for byte what NVIDIA's own bindings make of the same launch, but for the address of the attributes."""
    ids = reference.CUlaunchAttributeID
    cluster, cooperative, programmatic = (reference.CUlaunchAttribute() for _ in range(3))
    for attribute, number in (
        (cluster, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION),
        (cooperative, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE),
        (programmatic, ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
    ):
        attribute.id = number
    value = reference.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 2, 3, 4
    cluster.value = value
    value = reference.CUlaunchAttributeValue()
    value.cooperative = 1
    cooperative.value = value
    value = reference.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    programmatic.value = value
    want = reference.CUlaunchConfig()
    want.gridDimX, want.gridDimY, want.gridDimZ = 10, 11, 12
    want.blockDimX, want.blockDimY, want.blockDimZ = 13, 14, 15
    want.sharedMemBytes, want.hStream = 16, reference.CUstream(0x1234_5678_9ABC)
    want.attrs, want.numAttrs = [cluster, cooperative, programmatic], 3

    got = launch_config((10, 11, 12), (13, 14, 15), 16, (2, 3, 4), cooperative=True, programmatic=True)
    got.stream = 0x1234_5678_9ABC
    size, at = ctypes.sizeof(LaunchConfig), LaunchConfig.attributes.offset
    expected, actual = memory(want, size), bytes(got)
    assert actual[:at] + actual[at + 8 :] == expected[:at] + expected[at + 8 :]
    (address,) = struct.unpack_from("<Q", expected, at)
    attributes = ctypes.string_at(address, 3 * ctypes.sizeof(LaunchAttribute))
    assert bytes((LaunchAttribute * 3).from_address(ctypes.addressof(got.attributes.contents))) == attributes


def test_a_cluster_of_one_block_is_no_attribute() -> None:
    assert launch_config((1, 1, 1), (1, 1, 1), 0, (1, 1, 1), False, False).attribute_count == 0


@pytest.fixture(scope="module")
def cubin() -> bytes:
    error, program = nvrtc.nvrtcCreateProgram(
        b'extern "C" __global__ void f(int* p) { *p = 1; }', b"f.cu", 0, None, None
    )
    assert not error.value
    assert not nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"])[0].value
    data = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])  # written in place
    assert not nvrtc.nvrtcGetCUBIN(program, data)[0].value
    nvrtc.nvrtcDestroyProgram(program)
    return data


def test_whole_images_pass(cubin: bytes) -> None:
    check_image(cubin)
    check_image(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(cubin)) + cubin)


def test_cut_images_are_refused(cubin: bytes) -> None:
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(cubin)) + cubin
    for image in (cubin, fatbin):
        for length in (0, 1, 4, 15, 16, 63, 64, len(image) // 2, len(image) - 1):
            with pytest.raises(ValueError, match=r"cut to|neither|64-bit"):
                check_image(image[:length])


@pytest.mark.parametrize(("offset", "form"), [(32, "<Q"), (40, "<Q"), (58, "<H"), (60, "<H"), (54, "<H")])
def test_headers_that_point_outside_are_refused(cubin: bytes, offset: int, form: str) -> None:
    """Tables' offsets, entry sizes and counts in the ELF header, each set to a huge value."""
    damaged = bytearray(cubin)
    struct.pack_into(form, damaged, offset, 0xFFFF)
    with pytest.raises(ValueError, match=r"cut to|table entries"):
        check_image(bytes(damaged))


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - {"float4_e2m1fn_x2"}))
def test_fill_patterns_are_torchs_bits(dtype: str) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[DTYPE_BYTES[dtype]]
    for value in (0, 1, True, 2.0):
        pattern = torch.tensor([_bit_pattern(value, dtype, "step 0")], dtype=integers)
        wanted = torch.full((1,), value, dtype=getattr(torch, dtype))
        assert pattern.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("value", "dtype", "stage"), [(300, "uint8", "launch_error"), (1, "float4_e2m1fn_x2", "unsupported")]
)
def test_impossible_fills_are_named(value: int, dtype: str, stage: str) -> None:
    with pytest.raises(DeviceFault, match="step 3") as caught:
        _bit_pattern(value, dtype, "step 3")
    assert caught.value.stage == stage


def test_importing_the_device_loads_neither_torch_nor_the_driver() -> None:
    script = (
        "import sys\n"
        "import mkb_env.devices.cuda, mkb_env.devices.launcher\n"
        "from mkb_env.devices.cuda import available\n"
        "available()\n"
        "maps = open('/proc/self/maps').read()\n"
        "sys.exit(('torch' in sys.modules) + 2 * ('libcuda.so' in maps))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_available_agrees_with_torch() -> None:
    reason = available()
    assert (reason is None) == torch.cuda.is_available()
    assert reason is None or (reason and "\n" not in reason)
