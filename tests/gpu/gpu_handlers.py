"""The handler that a launcher's child runs in the GPU tests."""

import torch

from mkb_env import plan as plans
from mkb_env.devices.cuda import CudaDevice
from mkb_env.devices.launcher import progress


def run_plan(job: bytes, device: CudaDevice) -> bytes:
    """Run a plan without inputs; the bytes of its first output."""
    progress("load")
    loaded = device.load(plans.decode(job))
    bound = loaded.bind([])
    bound.poison()
    progress("run")
    bound.run()
    device.synchronize()
    data = bound.outputs[0].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    loaded.close()
    return data
