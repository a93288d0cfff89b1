"""How a replica uses the machine that Ray gives it."""

from __future__ import annotations

import os
from typing import Any

import ray

from jaxis.errors import ConfigError

# How many threads the libraries of a process start: XLA's, and those of numpy.
_THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS")


def use_reserved_cpus() -> None:
    """Gives this process, and those that it starts, a thread for each CPU that Ray reserved for it.

    Without it, every replica of a machine would have threads for all of its processors.
    """
    num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
    os.environ |= dict.fromkeys(_THREAD_VARIABLES, str(max(1, int(num_cpus))))


def resources_of_replica(num_replicas: int, num_devices: int) -> dict[str, Any]:
    """An equal share of the cluster's processors for each replica, and its accelerators, if there are any.

    Args:
      num_replicas: Replicas that share the cluster.
      num_devices: Accelerators that each of them uses.

    Returns:
      Arguments of a Ray actor: `num_cpus`, and `num_gpus` or `resources`.

    Raises:
      ConfigError: There are not enough accelerators.
    """
    cluster = ray.cluster_resources()
    share = cluster.get("CPU", 0.0) / num_replicas
    resources: dict[str, Any] = {"num_cpus": int(share) if share >= 1 else share}
    for name in ("GPU", "TPU"):
        if (available := cluster.get(name, 0.0)) == 0:
            continue
        if available < num_replicas * num_devices:
            raise ConfigError(
                f"{num_replicas} replicas on {num_devices} {name}s each need {num_replicas * num_devices}, and the "
                f"cluster has {available:g}: ask for fewer replicas"
            )
        resources |= {"num_gpus": num_devices} if name == "GPU" else {"resources": {"TPU": num_devices}}
    return resources
