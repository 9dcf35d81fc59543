"""A PTX interpreter over NumPy: runs launch plans on the CPU."""

from mkb_env.devices.simulator.device import SimulatorDevice

__all__ = ["SimulatorDevice"]
