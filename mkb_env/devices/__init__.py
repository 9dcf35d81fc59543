"""Devices run a launch plan on buffers the judge filled: the PTX simulator, or a GPU through the driver."""
