"""Servers of a test run live in a folder of their own and end with it."""

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before any worker starts: they inherit the folder."""
    if not hasattr(config, "workerinput"):
        config.mkb_runtime = tempfile.mkdtemp(prefix="mkb-test-")  # type: ignore[attr-defined]
        os.environ["MKB_RUNTIME_DIR"] = config.mkb_runtime  # type: ignore[attr-defined]
        os.environ["MKB_CACHE_DIR"] = ""  # tests record for real
        # Workers side by side already use every core; threads that wait for each other by spinning take it from them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the last test."""
    folder = getattr(config, "mkb_runtime", None)
    if folder:
        from mkb_env.servers.client import stop_all

        stop_all()
        shutil.rmtree(folder, ignore_errors=True)
