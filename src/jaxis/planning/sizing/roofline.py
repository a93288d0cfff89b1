"""Lower bounds of a step's time: what it moves and computes, divided by what a data sheet promises.

The roofline of https://jax-ml.github.io/scaling-book/roofline: reading memory, computing and sending to other devices
can overlap at best, so a step takes at least the longest of the three.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.planning.sizing.exchanges import Exchange, exchange_seconds
from jaxis.planning.sizing.layout import Layout
from jaxis.planning.targets import Target


@dataclass(frozen=True)
class StepCost:
    """What one device has to do in a step, at least.

    Attributes:
      weight_bytes: Bytes of weights read; of experts, those that tokens are expected to be routed to.
      context_bytes: Bytes of the cache read and written.
      flops: Operations of matrix units, two for each multiplication and addition. They compute in bfloat16: narrower
        weights are widened on the chip.
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
