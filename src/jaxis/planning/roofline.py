"""Lower bounds of a step's time: its traffic and operations, divided by a data sheet's rates.

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
    """The least work of one device in a step.

    Attributes:
      weight_bytes: Bytes of weights read, with the experts that tokens are expected to be routed to.
      flops: Operations of matrix units, two for each multiplication and addition. They compute in bfloat16: weights of
        lower precision are dequantized on the chip.
    """

    weight_bytes: float
    context_bytes: float
    flops: float
    exchanges: tuple[Exchange, ...]

    @property
    def sent_bytes(self) -> float:
        return sum(exchange.sent_bytes for exchange in self.exchanges)


@dataclass(frozen=True)
class Bound:
    """The least time of a step, and of each of its parts alone."""

    memory_seconds: float
    compute_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds, self.network_seconds)

    @property
    def binds(self) -> str:
        """The part that takes longest: "memory", "compute" or "network"."""
        parts = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "network": self.network_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def bound(cost: StepCost, target: Target, layout: Layout) -> Bound:
    """Computes the bound of a step of a server with this layout on a target's devices."""
    accelerator = target.accelerator
    return Bound(
        memory_seconds=(cost.weight_bytes + cost.context_bytes) / accelerator.memory_bandwidth,
        compute_seconds=cost.flops / accelerator.flops["bfloat16"],
        network_seconds=sum(exchange_seconds(exchange, target, layout) for exchange in cost.exchanges),
    )


class PipelineBound(NamedTuple):
    """The bound of a step that goes through one or more pipeline stages.

    `cost` and `slowest` are the stage's that takes longest: at most one step can leave the stages in this time.
    `seconds` pass until the step has been through all.
    """

    cost: StepCost
    slowest: Bound
    seconds: float


def pipeline_bound(costs: Sequence[StepCost], target: Target, layout: Layout) -> PipelineBound:
    """Computes the bound of a step from the costs of one device of each pipeline stage.

    Exchanges between stages overlap with other steps, but not with the step itself.
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
