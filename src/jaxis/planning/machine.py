"""A measured machine: the few constants that the time of a step here follows from, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.bench.limits import Limits
from jaxis.errors import ConfigError
from jaxis.host.cache_folder import cache_folder
from jaxis.host.cores import usable_cores
from jaxis.host.machine import cpu_model, host_bytes
from jaxis.kernels import native
from jaxis.version import __version__

ROWS = (1, 4, 16, 128, 512)
"""Tokens of the steps that are measured: of as many requests up to MOST_DECODED, else of one prompt."""
MOST_DECODED = 16
BITS = {"bfloat16": 16, "int8": 8, "int4": 4.5, "float32": 32}
WIDTHS = tuple(BITS)
"""Widths of weights whose products are measured; others count as the one whose elements have about as many bits."""

Curve = tuple[float, ...]
"""Seconds for each of ROWS."""


@dataclass(frozen=True)
class Machine:
    """A machine, as measured with engines of its own.

    Attributes:
      facts: Facts that the figures depend on; those of another machine or version are measured anew.
      limits: Limits with 1, 2, 4, ... threads, and with all, whose figures are those below.
      step: Seconds of a step that has no layers.
      layer: Seconds that each layer adds, whatever its size.
      step_barriers, layer_barriers: Kernels that threads share, in whose time they meet once, of those two.
      products: Seconds for each element of a matrix, by the width of its weights.
      state: Seconds for each byte of a request's recurrent states.
      context_byte: Seconds to read a byte of the cache in a decode.
      attention_flop: Seconds for an operation of attention in a prefill.
      ready, layer_ready: Seconds of a start until the first prompt without layers, and of each layer, with compiled
        programs on the disk.
      element_ready: Seconds to load an element, by the width in memory.
      base_bytes: Memory of a process beside weights and caches, without layers.
      layer_bytes: Memory that each layer adds to it, as a part of each program.
    """

    facts: Mapping[str, str | int]
    limits: tuple[Limits, ...]
    disk_bytes_per_second: float
    step: Curve
    layer: Curve
    step_barriers: float
    layer_barriers: float
    products: Mapping[str, Curve]
    state: Curve
    context_byte: float
    attention_flop: float
    ready: float
    layer_ready: float
    element_ready: Mapping[str, float]
    base_bytes: float
    layer_bytes: float

    def with_cores(self, cores: int) -> Machine:
        """Models this machine with so many cores, from how its limits grow with threads.

        Products wait for the memory as long as reads of their bytes take, and for arithmetic the rest of their time.
        """
        limits = limits_of(self.limits, cores)
        known = self.limits[-1]
        reads = known.memory_bytes_per_second / limits.memory_bytes_per_second
        flops = known.flops_per_second / limits.flops_per_second
        barrier = limits.barrier_seconds - known.barrier_seconds

        def product(width: str, seconds: float) -> float:
            reading = min(seconds, BITS[width] / 8 / known.memory_bytes_per_second)
            return reading * reads + (seconds - reading) * flops

        return dataclasses.replace(
            self,
            limits=(limits,),
            step=tuple(max(0.0, seconds + self.step_barriers * barrier) for seconds in self.step),
            layer=tuple(max(0.0, seconds + self.layer_barriers * barrier) for seconds in self.layer),
            products={width: tuple(product(width, each) for each in curve) for width, curve in self.products.items()},
            state=tuple(seconds * flops for seconds in self.state),
            context_byte=self.context_byte * reads,
            attention_flop=self.attention_flop * flops,
        )


def doubled(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to a number."""
    return [1 << power for power in range(most.bit_length())]


def limits_of(measured: Sequence[Limits], cores: int) -> Limits:
    """Interpolates limits between numbers of threads. Beyond, speeds grow by Amdahl's law, and barriers evenly."""
    threads = [limits.num_threads or 1 for limits in measured]
    more = cores - threads[-1]
    found = {}
    for name in [field.name for field in dataclasses.fields(Limits)][1:]:
        values = [getattr(limits, name) for limits in measured]
        value = float(np.interp(cores, threads, values))
        if more > 0 and name == "barrier_seconds":
            value += more * max(0.0, values[-1] - values[0]) / max(1, threads[-1] - 1)
        elif more > 0:
            # The part of its work that one thread does alone keeps all threads from being as many times faster.
            alone = max(0.0, (threads[-1] * values[0] / values[-1] - 1) / max(1, threads[-1] - 1))
            value *= cores / (1 + alone * (cores - 1)) * (1 + alone * (threads[-1] - 1)) / threads[-1]
        found[name] = value
    return Limits(cores, **found)


def at(curve: Curve, rows: float) -> float:
    """Interpolates a curve; beyond its end, more rows take as long each as the last ones."""
    if rows > ROWS[-1]:
        return curve[-1] * rows / ROWS[-1]
    return float(np.interp(rows, ROWS, curve))


def facts() -> dict[str, str | int]:
    return {
        "jaxis": __version__,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": host_bytes(),
        "kernels": native.status(),
    }


def machine_file() -> Path:
    return cache_folder() / "machine.json"


def kept_machine() -> Machine | None:
    """Returns the kept figures of this machine; None if there are none, or those of another one or version.

    Raises ConfigError if the file is not what `keep` wrote.
    """
    path = machine_file()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _parsed(found) if found["facts"] == facts() else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} has no figures of a machine: measure them anew with --on this --again") from None


def _parsed(values: dict[str, Any]) -> Machine:
    """Raises ValueError, KeyError or TypeError for values that `keep` does not write."""
    read = {
        "float": _figure,
        "tuple[Limits, ...]": lambda value: tuple(_limits(each) for each in value),
        "Curve": _curve,
        "Mapping[str, float]": lambda value: {width: _figure(value[width]) for width in WIDTHS},
        "Mapping[str, Curve]": lambda value: {width: _curve(value[width]) for width in WIDTHS},
    }
    figures = {each.name: read[str(each.type)](values[each.name]) for each in dataclasses.fields(Machine)[1:]}
    if figures["disk_bytes_per_second"] == 0 or len(values) != len(figures) + 1:
        raise ValueError
    return Machine(values["facts"], **figures)


def _figure(value: float) -> float:
    if isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError
    return value


def _limits(values: dict[str, Any]) -> Limits:
    limits = Limits(**values)
    if not all(_figure(speed) for speed in dataclasses.astuple(limits)[:-1]):
        raise ValueError
    return limits


def _curve(values: list[float]) -> Curve:
    if len(values) != len(ROWS):
        raise ValueError
    return tuple(map(_figure, values))


def keep(machine: Machine) -> None:
    """Writes the file, whole or not at all. Raises ConfigError if it cannot be written."""
    path = machine_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(dataclasses.asdict(machine), indent=2), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
