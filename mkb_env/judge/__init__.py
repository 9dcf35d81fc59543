"""Judging: turn a plan and a problem into a verdict. Importing this package loads no torch."""
