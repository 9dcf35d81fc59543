"""A Ray cluster of several nodes on this machine, on the loopback interface, for each test file that asks for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray warns in every worker
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # stay on the loopback interface

STORE_BYTES = 80 << 20
KEY = "MKB_TEST_API_KEY"


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Three nodes with one CPU each. RAY_ADDRESS names them; a key in the environment must not reach a server."""
    import ray
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv(KEY, "secret")
    common: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 4, "health_check_initial_delay_ms": 500}
    cluster = Cluster(
        initialize_head=True, head_node_args={**common, "node_ip_address": "127.0.0.1", "_system_config": quick}
    )
    patch.setenv("RAY_ADDRESS", cluster.address)
    for _ in range(2):
        cluster.add_node(**common)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()
