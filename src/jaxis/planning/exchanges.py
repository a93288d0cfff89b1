"""Exchanges of a server's devices in a step: their bytes, links, and least time."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jaxis.compilation.targets import Target
from jaxis.parallel.mesh import DATA_AXIS, MODEL_AXIS
from jaxis.planning.layout import Layout

STAGE_AXIS = "stage"
"""Name of the exchange from one pipeline stage to the next; not an axis of a mesh."""


@dataclass(frozen=True)
class Exchange:
    """Exchanges of one kind in a step.

    Attributes:
      axes: Mesh axes along which devices form a group that exchanges, or STAGE_AXIS.
      nbytes: Bytes of the whole array: before it is summed or scattered, or after it was gathered.
    """

    name: str
    opcode: str
    axes: tuple[str, ...]
    group_size: int
    nbytes: float
    count: int

    @property
    def sent_bytes(self) -> float:
        """Least bytes that each device sends in a step."""
        return self.count * sent_bytes(self.opcode, self.nbytes, self.group_size)


def sent_bytes(opcode: str, nbytes: float, group_size: int) -> float:
    """Returns the least bytes that each device of a group sends in one exchange of an array of `nbytes`.

    An all-reduce is a reduce-scatter and an all-gather, each of which sends every part but one
    (doi:10.1016/j.jpdc.2008.09.002).
    """
    if opcode == "collective-permute":
        return nbytes if group_size > 1 else 0.0
    parts = (group_size - 1) / group_size
    return (2 if opcode == "all-reduce" else 1) * nbytes * parts


def exchange_seconds(exchange: Exchange, target: Target, layout: Layout) -> float:
    """Computes the least time of an exchange, for all of its number in a step.

    Between GPUs of several hosts, each host's GPUs share the work: data for the network is sent once from each host, a
    part by each of its GPUs.
    """
    accelerator = target.accelerator
    if accelerator.network_bandwidth is None:
        bandwidth = accelerator.interconnect_bandwidth * _share_of_links(exchange.axes, target, layout)
        return exchange.sent_bytes / bandwidth
    per_host = _group_on_host(exchange, target, layout)
    inside = sent_bytes(exchange.opcode, exchange.nbytes, per_host) / accelerator.interconnect_bandwidth
    num_hosts = exchange.group_size // per_host
    between = sent_bytes(exchange.opcode, exchange.nbytes / per_host, num_hosts) / accelerator.network_bandwidth
    return exchange.count * max(inside, between)


def links(exchange: Exchange, target: Target, layout: Layout) -> str:
    """Names the links of an exchange, for people."""
    if target.accelerator.network_bandwidth is None:
        share = _share_of_links(exchange.axes, target, layout)
        return "ICI" if share == 1 else f"{share:.0%} of ICI"
    per_host = _group_on_host(exchange, target, layout)
    if per_host == exchange.group_size:
        return "NVLink"
    return "network"


def _share_of_links(axes: tuple[str, ...], target: Target, layout: Layout) -> float:
    """Returns the share of a TPU's links that lead along these mesh axes.

    If both axes of the mesh are whole dimensions of the grid of chips, each has its own links. Otherwise, or with one
    axis only, all links may help.
    """
    sizes = {DATA_AXIS: layout.data_parallel_size, MODEL_AXIS: layout.tensor_parallel_size}
    if len(axes) != 1 or 1 in sizes.values() or layout.num_devices != target.num_devices:
        return 1.0
    num_long = sum(size > 1 for size in target.grid)
    for number in range(1, num_long):
        for chosen in itertools.combinations([size for size in target.grid if size > 1], number):
            if math.prod(chosen) == sizes[axes[0]]:
                return number / num_long
    return 1.0


def _group_on_host(exchange: Exchange, target: Target, layout: Layout) -> int:
    """Returns the number of devices of a group on the same host; neighbours along the model axis are.

    Stages of several hosts count as if none had its neighbour on the same one.
    """
    per_host = min(target.devices_per_host, layout.num_devices)
    if MODEL_AXIS in exchange.axes:
        return min(exchange.group_size, per_host)
    if STAGE_AXIS in exchange.axes:
        return exchange.group_size if layout.num_hosts(target) == 1 else 1
    return max(1, min(exchange.group_size, per_host // layout.tensor_parallel_size))
