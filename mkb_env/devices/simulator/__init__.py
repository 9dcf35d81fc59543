"""A PTX interpreter over NumPy: runs launch plans on the CPU."""
