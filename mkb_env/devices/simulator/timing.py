"""placeholder"""


def launch_us(l, p, r):
    return 1.0


def memory_step_us(n):
    return 1.0
