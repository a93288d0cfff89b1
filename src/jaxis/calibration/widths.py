"""Choice of a quantization rule for each module of a model, from measurements on text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jaxis.calibration.evaluate import SourcePredictions
from jaxis.calibration.sensitivity import WINDOW_TOKENS, ModuleSensitivity, OnProgress, Option, measure_sensitivity
from jaxis.calibration.text import read_windows
from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.quantization_rules import QuantizationRule
from jaxis.tokenizer import Tokenizer

# In order of bits, in groups of 32 input features.
WIDTH_RULES = (
    QuantizationRule(".*", "int4", "int8", 32, "affine"),
    QuantizationRule(".*", "int5", "int8", 32, "affine"),
    QuantizationRule(".*", "int6", "int8", 32, "affine"),
    QuantizationRule(".*", "int8", "int8", 32),
)
_CLOSE_ENOUGH = 0.01  # share of the bytes: a search ends when it is this close to the limit
MAX_MEASUREMENTS = 8


@dataclass(frozen=True)
class _Step:
    """A step of one module from option `index - 1` on its hull to `index`."""

    module: int
    index: int
    num_bytes: int
    kl_saved: float


class WidthChoice:
    """Allocations of options to modules, from the smallest to the largest.

    The first allocation gives each module its option of fewest bits. Steps then follow in order of the divergence they
    save for each byte. Only options on the lower convex hull of (bytes, divergence) are used, so a module's steps are
    in order. Every allocation has the least divergence (to second order) of all that are not larger.

    Args:
      modules: Cost of each module; modules without options stay unquantized.

    Attributes:
      num_weights: Number of elements of all matrices.
      num_bytes, kl: Size and divergence (to second order) of each allocation.
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
        return len(self._steps) + 1

    def options(self, number: int) -> dict[str, Option]:
        """Returns the option of each module in an allocation, by name. Allocation 0 is the smallest."""
        return self._options(self._steps[:number])

    def within_bits(self, target_bits: float) -> dict[str, Option]:
        """Returns the option of each module, by name, with at most this many bits per weight on average.

        Raises ConfigError if even the smallest allocation has more.
        """
        budget = target_bits * self.num_weights / 8
        size = self.num_bytes[0]
        if size > budget:
            raise ConfigError(
                f"target_bits={target_bits} is less than the {8 * size / self.num_weights:.2f} bits a weight of the "
                "smallest weights: give more"
            )
        taken, full = [], set()
        for step in self._steps:
            if step.module not in full and size + step.num_bytes <= budget:
                taken.append(step)
                size += step.num_bytes
            else:
                full.add(step.module)  # what follows would enlarge it from where it has not got
        return self._options(taken)

    def within_kl(self, max_kl: float, measure: Callable[[dict[str, Option]], float]) -> dict[str, Option]:
        """Returns the options of the smallest allocation found whose measured divergence is at most `max_kl` nats.

        The search assumes that divergence falls along the allocations. It ends once its bounds are within 1% of the
        bytes of each other. Raises ConfigError if even the largest allocation diverges more.
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
            # If the prediction is at a bound repeatedly, halving is faster.
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
    return tuple(
        dataclasses.replace(option.rule, module_path=re.escape(name).replace(r"\_", "_"))
        for name, option in options.items()
    )


def _lower_hull(options: Sequence[Option]) -> list[Option]:
    """Returns the options on the lower convex hull of divergence over bytes, from the smallest."""
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


def choose_rules(
    source: Path,
    texts: Sequence[Path],
    predictions: SourcePredictions | None = None,
    *,
    target_bits: float | None = None,
    max_kl: float | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[QuantizationRule, ...]:
    """Chooses one rule for each module, with the least divergence on text.

    `target_bits` limits the bits per weight, on average over all quantized modules, including embeddings and head.
    `max_kl` limits the mean divergence in nats instead, as `predictions` of the source measure it with quantized
    activations; the smallest weights found within the limit are chosen.

    Raises:
      ConfigError: No choice is within the limit, or the model cannot be loaded.
      RequestError: A text file cannot be used.
      CheckpointError: The model cannot be loaded, or is quantized already.
    """
    if (target_bits is None) == (max_kl is None):
        raise ValueError("give either target_bits or max_kl")
    if read_hf_config(source).get("quantization_config") is not None:
        raise CheckpointError(f"{source} is quantized already: give the unquantized checkpoint")
    tokenizer = Tokenizer.from_path(source)
    windows = [window for text in texts for window in read_windows(text, tokenizer, WINDOW_TOKENS)]
    # Each other length would need another program.
    longest = max(map(len, windows))
    windows = [window for window in windows if len(window) == longest]
    choice = WidthChoice(measure_sensitivity(source, windows, WIDTH_RULES, on_progress=on_progress))

    if target_bits is not None:
        return rules_of(choice.within_bits(target_bits))
    assert max_kl is not None
    assert predictions is not None

    def measure(options: dict[str, Option]) -> float:
        return predictions.evaluate(source, quantization=rules_of(options)).kl_mean

    return rules_of(choice.within_kl(max_kl, measure))
