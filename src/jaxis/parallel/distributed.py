"""Group of JAX processes on several hosts, which together have one mesh of devices."""

from __future__ import annotations

import contextlib
import socket

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxis.errors import ConfigError, EngineError

# JAX ends a process of the group without a message when another one has been silent for this long, and never notices a
# stuck one. The connections between hosts detect the end of a host instead.
_HEARTBEAT_SECONDS = 7 * 24 * 3600
_SHUTDOWN_SECONDS = 20


def initialize(coordinator: str, num_hosts: int, rank: int, timeout_seconds: int) -> None:
    """Adds this process to a group, before anything else asks JAX for devices.

    Args:
      coordinator: ADDRESS:PORT on the first host, which listens there.
      num_hosts: Number of hosts in the group.
      rank: Index of this host, from 0.
      timeout_seconds: Time limit for all hosts to join.

    Raises:
      EngineError: JAX has been used in this process already, or the other hosts did not join.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            num_hosts,
            rank,
            cluster_detection_method="deactivate",
            # Otherwise it listens on every interface.
            coordinator_bind_address=coordinator if rank == 0 else None,
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
        # A process exchanges its devices with the others when it first looks at them: all processes do so now.
        jax.devices()
    except RuntimeError as error:
        raise EngineError(f"JAX's processes on {num_hosts} hosts cannot meet at {coordinator}: {error}") from None


def initialize_by_cluster(timeout_seconds: int) -> None:
    """Adds this process to the group of the cluster that started it: Slurm, Open MPI, Kubernetes, TPU pods.

    Raises ConfigError if no cluster started it, and EngineError as `initialize` does.
    """
    try:
        jax.distributed.initialize(
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
        jax.devices()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"no cluster that JAX knows started this process ({error})") from None
    except RuntimeError as error:
        raise EngineError(f"JAX's processes of this cluster cannot meet: {error}") from None


def text_of_first(text: str) -> str:
    """Returns a short text of process 0 in all processes."""
    sent = np.zeros(256, np.uint8)
    data = text.encode()
    sent[: len(data)] = np.frombuffer(data, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).rstrip(b"\0").decode()


def largest(number: int) -> int:
    """Returns the largest of all processes' numbers."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def wait_for_all(what: str) -> None:
    """Waits until all processes have come here; `what` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def meet(mesh: Mesh) -> None:
    """Waits until the hosts of a mesh have exchanged something: the first exchange waits for others only briefly."""
    values = jnp.ones(mesh.size, device=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    try:
        np.asarray(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        message = str(error).partition("\n")[0]
        raise EngineError(f"the hosts cannot reach each other's devices: {message}") from None


def leave() -> None:
    """Leaves the group once the other processes do too."""
    with contextlib.suppress(RuntimeError):  # one of them has ended
        jax.distributed.shutdown()


def free_port(address: str) -> int:
    """Returns a port that nothing listens on now. Raises OSError if the address is not this machine's."""
    with socket.create_server((address, 0)) as listener:
        return listener.getsockname()[1]
