"""Gymnasium environments in which an agent writes GPU kernels."""
