"""Lower bounds of a step's time: what it moves and computes, divided by what a data sheet promises.

The roofline of https://jax-ml.github.io/scaling-book/roofline: reading memory, computing and sending to other devices
can overlap at best, so a step takes at least the longest of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxis.compilation.targets import Target
from jaxis.planning.exchanges import STAGE_AXIS, Exchange, exchange_seconds
from jaxis.planning.layout import Layout


@dataclass(frozen=True)
class StepCost:
    """What one device has to do in a step, at least.

    Attributes:
      weight_bytes: Bytes of weights read; of experts, those that tokens are expected to be routed to.
      context_bytes: Bytes of the cache read and written.
      flops: Operations of matrix units, two for each multiplication and addition. They compute in bfloat16: weights of
        lower precision are dequantized on the chip.
      exchanges: What it sends to other devices.
    """

    weight_bytes: float
    context_bytes: float
    flops: float
    exchanges: tuple[Exchange, ...]

    @property
    def sent_bytes(self) -> float:
        """Bytes sent to other devices."""
        return sum(exchange.sent_bytes for exchange in self.exchanges)


@dataclass(frozen=True)
class Bound:
    """The least time of a step.

    Attributes:
      memory_seconds, compute_seconds, network_seconds: What each part takes alone.
    """

    memory_seconds: float
    compute_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        """The least time of the step."""
        return max(self.memory_seconds, self.compute_seconds, self.network_seconds)

    @property
    def binds(self) -> str:
        """What takes longest: "memory", "compute" or "network"."""
        parts = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "network": self.network_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def bound(cost: StepCost, target: Target, layout: Layout) -> Bound:
    """The bound of a step of a server that is laid out so on a target's devices."""
    accelerator = target.accelerator
    return Bound(
        memory_seconds=(cost.weight_bytes + cost.context_bytes) / accelerator.memory_bandwidth,
        compute_seconds=cost.flops / accelerator.flops["bfloat16"],
        network_seconds=sum(exchange_seconds(exchange, target, layout) for exchange in cost.exchanges),
    )


class PipelineBound(NamedTuple):
    """The bound of a step that goes through pipeline stages, one after the other; or through one.

    Attributes:
      cost: Of the stage that takes longest.
      slowest: Its bound. No more than one step can leave the stages in this time.
      seconds: The least time until the step has been through all.
    """

    cost: StepCost
    slowest: Bound
    seconds: float


def pipeline_bound(costs: Sequence[StepCost], target: Target, layout: Layout) -> PipelineBound:
    """The bound of a step of a server that is laid out so on a target's devices.

    What is handed on overlaps with other steps, but not with the step itself.

    Args:
      costs: Of one device of each stage.
      target: The devices.
      layout: How they are shared.
    """
    bounds = [bound(cost, target, layout) for cost in costs]
    slowest = max(range(len(bounds)), key=lambda index: bounds[index].seconds)
    own = [tuple(e for e in cost.exchanges if STAGE_AXIS not in e.axes) for cost in costs]
    inside = [
        bound(replace(cost, exchanges=exchanges), target, layout) for cost, exchanges in zip(costs, own, strict=True)
    ]
    between = sum(
        exchange_seconds(exchange, target, layout)
        for cost in costs[:-1]
        for exchange in cost.exchanges
        if STAGE_AXIS in exchange.axes
    )
    return PipelineBound(costs[slowest], bounds[slowest], sum(each.seconds for each in inside) + between)
