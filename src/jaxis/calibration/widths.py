"""Chooses the width of each module's weights: the least divergence within a number of bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxis.calibration.sensitivity import ModuleSensitivity, Option
from jaxis.errors import ConfigError
from jaxis.quantization_rules import QuantizationRule

# From the narrowest, in groups of 32 input features.
WIDTH_RULES = (
    QuantizationRule(".*", "int4", "int8", 32, "affine"),
    QuantizationRule(".*", "int5", "int8", 32, "affine"),
    QuantizationRule(".*", "int6", "int8", 32, "affine"),
    QuantizationRule(".*", "int8", "int8", 32),
)
_CLOSE_ENOUGH = 0.01  # of the bytes: a search that is this near to the limit ends
MAX_MEASUREMENTS = 8


@dataclass(frozen=True)
class _Step:
    """Widens one module from its option `index - 1` to `index` on its hull."""

    module: int
    index: int
    num_bytes: int
    kl_saved: float


class WidthChoice:
    """Allocations of widths to modules, from the smallest to the largest.

    Starting with the narrowest option of each module, the step that saves the most divergence for each byte comes
    first. Only options on the lower convex hull of (bytes, divergence) are used, so that a module's steps come in their
    order; every allocation along the way then has the least divergence (to second order) of all that are not larger.

    Args:
      modules: What each costs; those without options stay as they are.

    Attributes:
      num_weights: Elements of all matrices.
      num_bytes, kl: Of each allocation; the divergence is to second order.
    """

    def __init__(self, modules: Sequence[ModuleSensitivity]) -> None:
        self._modules = [module for module in modules if module.options]
        self._hulls = [_lower_hull(module.options) for module in self._modules]
        steps = [
            _Step(number, index, after.num_bytes - before.num_bytes, before.kl - after.kl)
            for number, hull in enumerate(self._hulls)
            for index, (before, after) in enumerate(pairwise(hull), 1)
        ]
        self._steps = sorted(steps, key=lambda step: (-step.kl_saved / step.num_bytes, step.index))
        self.num_weights = sum(module.num_weights for module in self._modules)
        self.num_bytes = [sum(hull[0].num_bytes for hull in self._hulls)]
        self.kl = [sum(hull[0].kl for hull in self._hulls)]
        for step in self._steps:
            self.num_bytes.append(self.num_bytes[-1] + step.num_bytes)
            self.kl.append(self.kl[-1] - step.kl_saved)

    def __len__(self) -> int:
        """Number of allocations."""
        return len(self._steps) + 1

    def options(self, number: int) -> dict[str, Option]:
        """Module name -> its option in one of the allocations, of which the first is the smallest."""
        return self._options(self._steps[:number])

    def within_bits(self, target_bits: float) -> dict[str, Option]:
        """Module name -> option, with at most this many bits a weight on average.

        Raises:
          ConfigError: Even the smallest allocation has more.
        """
        budget = target_bits * self.num_weights / 8
        size = self.num_bytes[0]
        if size > budget:
            raise ConfigError(
                f"target_bits={target_bits} is less than the {8 * size / self.num_weights:.2f} bits a weight of the "
                "narrowest weights: give more"
            )
        taken, full = [], set()
        for step in self._steps:
            if step.module not in full and size + step.num_bytes <= budget:
                taken.append(step)
                size += step.num_bytes
            else:
                full.add(step.module)  # what follows would widen it from where it has not got
        return self._options(taken)

    def within_kl(self, max_kl: float, measure: Callable[[dict[str, Option]], float]) -> dict[str, Option]:
        """Module name -> option of the smallest allocation found whose measured divergence is within the limit.

        The search assumes that divergence falls along the allocations, and ends once its bounds are within 1% of the
        bytes of each other.

        Args:
          max_kl: In nats.
          measure: The true divergence of an allocation.

        Raises:
          ConfigError: The largest allocation diverges more.
        """
        low, high = -1, len(self) - 1  # the largest known to diverge too much, and the smallest known not to
        least = measure(self.options(high))
        if least > max_kl:
            raise ConfigError(
                f"max_kl={max_kl}: the widest weights already have a divergence of {least:.5f} on this text: give more"
            )
        ratio = 1.0  # measured to predicted
        for _ in range(MAX_MEASUREMENTS):
            if high - low <= 1 or (
                low >= 0 and self.num_bytes[high] - self.num_bytes[low] <= _CLOSE_ENOUGH * self.num_bytes[high]
            ):
                break
            wanted = next((i for i in range(low + 1, high) if self.kl[i] * ratio <= max_kl), high - 1)
            # Where the prediction is at a bound again and again, halving is faster.
            number = (low + high) // 2 if wanted in (low + 1, high - 1) and ratio != 1.0 else wanted
            measured = measure(self.options(number))
            ratio = measured / max(self.kl[number], 1e-12)
            low, high = (low, number) if measured <= max_kl else (number, high)
        return self.options(high)

    def _options(self, steps: Sequence[_Step]) -> dict[str, Option]:
        reached = [0] * len(self._hulls)
        for step in steps:
            reached[step.module] = max(reached[step.module], step.index)
        return {
            module.name: hull[index] for module, hull, index in zip(self._modules, self._hulls, reached, strict=True)
        }


def rules_of(options: dict[str, Option]) -> tuple[QuantizationRule, ...]:
    """One rule for each module."""
    return tuple(
        dataclasses.replace(option.rule, module_path=re.escape(name).replace(r"\_", "_"))
        for name, option in options.items()
    )


def _lower_hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of divergence over bytes, from the smallest on."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.num_bytes, option.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(smaller: Option, larger: Option) -> float:
    return (larger.kl - smaller.kl) / (larger.num_bytes - smaller.num_bytes)
