"""A replica on several hosts: its placement group has a bundle for each host, with a follower's actor in each.

Ray places, starts and ends the actors. Steps go from host to host directly; see `jaxis.engine.hosts`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxis.engine.arguments import EngineArgs
from jaxis.errors import EngineError
from jaxis.integrations.ray_replicas import use_reserved_cpus
from jaxis.server.listener import listen

# Ray's options of actors for some resources; all other resources are in the option `resources`.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_ACCELERATOR_SHARE = 0.001  # Ray's share of a node's "accelerator_type:..." for an actor that asks for it


class JaxisFollower:
    """Actor on a host of a replica, other than the first. Its process ends with the group."""

    def is_placed(self) -> bool:
        """Returns True, once a node runs the actor and has imported its modules."""
        use_reserved_cpus()
        return True

    def follow(self, place: Mapping[str, Any], own_arguments: dict[str, Any]) -> None:
        """Carries out the leader's orders until the leader ends.

        Args:
          place: Fields of `HostPlace`.
          own_arguments: Arguments of this host; see `jaxis.engine.follower.follow`.
        """
        # JAX reads its number of threads when it is imported.
        from jaxis.engine.follower import follow
        from jaxis.engine.hosts.meeting import HostPlace
        from jaxis.host.logs import set_up_logs
        from jaxis.host.progress import ProgressDisplay

        set_up_logs(as_json=False, level=logging.INFO)
        follow(HostPlace(**place), own_arguments, ProgressDisplay())


class ReplicaHosts:
    """Actors on this replica's other hosts. Ray ends them with the replica.

    Attributes:
      leader_arguments: Engine arguments with the leader's address.

    Args:
      args: Engine arguments; the replica's placement group has a bundle for each of its `nnodes`.

    Raises:
      EngineError: An actor could not start.
    """

    def __init__(self, args: EngineArgs) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None  # `host_bundles`
        self._actors = [_start(group, rank) for rank in range(1, args.nnodes)]
        try:
            ray.get([actor.is_placed.remote() for actor in self._actors], timeout=args.distributed_timeout_seconds)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise EngineError(f"not all of the replica's {args.nnodes} hosts could start: {reason}") from None
        address = ray.util.get_node_ip_address()
        with listen(address, 0) as listener:
            port = listener.getsockname()[1]
        self.leader_arguments = {"master_addr": address, "master_port": port}
        place = {"num_hosts": args.nnodes, "address": address, "port": port}
        place["timeout_seconds"] = args.distributed_timeout_seconds
        own = {"token": args.token, "cache_dir": args.cache_dir}
        for rank, actor in enumerate(self._actors, 1):
            actor.follow.remote(place | {"rank": rank}, own)


def _start(group: PlacementGroup, rank: int) -> Any:
    """Starts an actor that takes a whole bundle."""
    bundle = group.bundle_specs[rank]
    options: dict[str, Any] = {_OPTIONS[name]: amount for name, amount in bundle.items() if name in _OPTIONS}
    options["resources"] = {name: amount for name, amount in bundle.items() if name not in _OPTIONS}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(JaxisFollower).options(scheduling_strategy=strategy, **options).remote()


def host_bundles(num_hosts: int, actor_options: Mapping[str, Any]) -> list[dict[str, float]]:
    """Returns the bundles of a replica's hosts. Each has the resources of the first host's actor.

    Args:
      num_hosts: Number of hosts.
      actor_options: The deployment's `ray_actor_options`.
    """
    bundle = {"CPU": float(actor_options.get("num_cpus", 1))}
    for name in ("GPU", "memory"):
        if amount := actor_options.get(_OPTIONS[name]):
            bundle[name] = float(amount)
    if kind := actor_options.get("accelerator_type"):
        bundle[f"accelerator_type:{kind}"] = _ACCELERATOR_SHARE
    bundle |= actor_options.get("resources") or {}
    return [dict(bundle) for _ in range(num_hosts)]
