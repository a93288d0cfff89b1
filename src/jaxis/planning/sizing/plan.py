"""Plans how a model is served on accelerators: what fits, what it is given up for, and how fast a step can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxis.bringup.analyze.source import ModelSource
from jaxis.errors import ConfigError
from jaxis.planning.sizing.capacity import capacity
from jaxis.planning.sizing.device_model import DeviceModel, device_model
from jaxis.planning.sizing.roofline import Bound, StepCost, bound
from jaxis.planning.sizing.widths import NARROW, Width, widths
from jaxis.planning.targets import Target

DEFAULT_CONTEXT_LEN = 4096
CACHE_DTYPES = {"auto": None, "int8": jnp.int8}
"""Type of the cache, as `--kv-cache-dtype` has it; "auto" is the model's."""


@dataclass(frozen=True)
class CompiledStep:
    """What the programs of a step are like, on each device, after the target's compiler.

    Attributes:
      hbm_bytes: Read from and written to memory, without jaxis's own kernels and without loops.
      loop_hbm_bytes: The same in the bodies of loops, each once.
      temporary_bytes: Memory besides weights, caches and results.
      num_collectives: Exchanges between devices.
      num_loops: Loops of unknown length.
      caches_are_aliased: Whether the caches are updated in place.
      largest_copy_bytes: Of the largest array that is only moved; 0 if none is.
    """

    hbm_bytes: int
    loop_hbm_bytes: int
    temporary_bytes: int
    num_collectives: int
    num_loops: int
    caches_are_aliased: bool
    largest_copy_bytes: int


@dataclass(frozen=True)
class Step:
    """A step and its bound.

    Attributes:
      name: "decode" or "prefill".
      num_requests: Requests that take part, on the devices of one server.
      num_tokens: Tokens that the step computes.
      context_len: Tokens that each request has at its end.
      cost: What a device has to do.
      bound: The least time for it.
      tokens_per_second: Tokens over that time, of all servers together.
      compiled: What the compiler made of it; None if it was not asked, and the cost is arithmetic.
    """

    name: str
    num_requests: int
    num_tokens: int
    context_len: int
    cost: StepCost
    bound: Bound
    tokens_per_second: float
    compiled: CompiledStep | None = None


@dataclass(frozen=True)
class PlanOption:
    """One way to serve the model.

    Attributes:
      quantization: What `--quantization` gets; None leaves weights as stored.
      weights: How they are stored, for people.
      kv_cache_dtype: What `--kv-cache-dtype` gets.
      tensor_parallel_size: Devices that share each layer.
      num_servers: Servers that the target has devices for; they share nothing.
      hosts_of_server: Hosts whose devices one server needs.
      device_weight_bytes: Bytes of the weights on each device.
      device_cache_bytes: Bytes that are left for the cache there; negative if the weights do not fit.
      max_context: Tokens of the longest single request; 0 if none fits.
      max_requests: Requests of the asked-for length that a server holds at once.
      steps: A decode of one request, one of all that fit, and a prefill of the most tokens of a step; none if not even
        one fits.
    """

    quantization: str | None
    weights: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    num_servers: int
    hosts_of_server: int
    device_weight_bytes: int
    device_cache_bytes: int
    max_context: int
    max_requests: int
    steps: tuple[Step, ...]

    @property
    def fits(self) -> bool:
        """Whether a request of the asked-for length fits."""
        return self.max_requests > 0

    @property
    def width_rank(self) -> int:
        """0 for weights as stored (or dequantized), more for narrower ones."""
        return 1 + NARROW.index(self.quantization) if self.quantization in NARROW else 0

    @property
    def can_run(self) -> bool:
        """Whether jaxis can run it: it fits, and it needs the devices of one host only."""
        return self.fits and self.hosts_of_server == 1


@dataclass(frozen=True)
class Wanted:
    """What a plan has to keep to.

    Attributes:
      context_len: Tokens that each request grows to; None is 4,096, or the model's longest.
      quantization: As for `--quantization`: int8, int4, dequantize, or none; None leaves the choice to the plan.
      kv_cache_dtype: A key of CACHE_DTYPES; None leaves the choice to the plan.
      dtype: Type of activations and of weights in floats; None is the checkpoint's.
      tensor_parallel_size: Devices that share each layer; None leaves the choice to the plan.
    """

    context_len: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    tensor_parallel_size: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a model is served on a target.

    Attributes:
      target: The devices.
      wanted: What the plan had to keep to.
      context_len: Tokens that each request grows to.
      max_model_len: The longest context that the model is for.
      prefill_tokens: Most tokens of a step.
      options: The ways that were looked at, best first: those that run, then those that fit but need several hosts,
        then those that do not fit.
    """

    target: Target
    wanted: Wanted
    context_len: int
    max_model_len: int
    prefill_tokens: int
    options: tuple[PlanOption, ...]

    @property
    def chosen(self) -> PlanOption:
        """The best option: the widest weights that run, on the most devices."""
        return self.options[0]


class Planner:
    """Plans for one model; it is constructed once for each width of its weights."""

    def __init__(self, source: ModelSource, wanted: Wanted) -> None:
        """Constructs the model in each width that is wanted.

        Args:
          source: The model.
          wanted: What its plans have to keep to.

        Raises:
          ConfigError: jaxis cannot run the model, or not as it is wanted.
        """
        self.widths = widths(source, wanted.quantization, wanted.dtype)
        self._wanted = wanted
        stored = self.widths[0].vllm_config
        self._longest = stored.model_config.max_model_len
        self._step_tokens = stored.scheduler_config.max_num_batched_tokens
        self.context_len = wanted.context_len or min(DEFAULT_CONTEXT_LEN, self._longest)
        if self.context_len > self._longest:
            raise ConfigError(
                f"--max-model-len {self.context_len} is more than the model's {self._longest} tokens: give less"
            )

    def plan(self, target: Target) -> Plan:
        """The plan for a target.

        Raises:
          ConfigError: The devices cannot be shared as they are wanted to be.
        """
        options = sorted(self._options(target), key=_rank)
        prefill_tokens = min(self._step_tokens, self.context_len)
        return Plan(target, self._wanted, self.context_len, self._longest, prefill_tokens, tuple(options))

    def device_model(self, target: Target) -> DeviceModel:
        """A device's part of the model as it is stored, over all devices of a target.

        Raises:
          ConfigError: The model cannot be spread over so many devices.
        """
        return self._device_model(target, self.widths[0], "auto", target.num_devices)

    def width_of(self, option: PlanOption) -> Width:
        """The model as an option of a plan has it."""
        return next(width for width in self.widths if width.quantization == option.quantization)

    def _device_model(self, target: Target, width: Width, cache: str, num_devices: int) -> DeviceModel:
        dtype = CACHE_DTYPES[cache] or width.vllm_config.model_config.dtype
        weights = width.weights_on(num_devices)
        return device_model(
            width.cache_specs,
            width.layers_per_cache,
            weights,
            width.vllm_config,
            target.accelerator,
            num_devices,
            dtype,
        )

    def _options(self, target: Target) -> Iterator[PlanOption]:
        caches = CACHE_DTYPES if self._wanted.kv_cache_dtype is None else (self._wanted.kv_cache_dtype,)
        for size in self._sizes(target):
            for width in self.widths:
                for cache in caches:
                    yield self._option(target, width, cache, size)

    def _sizes(self, target: Target) -> Sequence[int]:
        """The numbers of devices that the model can be spread over."""
        wanted, width = self._wanted.tensor_parallel_size, self.widths[0]
        if wanted is not None:
            if not 1 <= wanted <= target.num_devices:
                raise ConfigError(f"--tensor-parallel-size {wanted}: {target} has {target.num_devices} devices")
            self._device_model(target, width, "auto", wanted)
            return [wanted]
        sizes = []
        for size in range(1, target.num_devices + 1):
            if target.num_devices % size == 0:
                try:
                    self._device_model(target, width, "auto", size)
                except ConfigError:  # its heads cannot be split so
                    continue
                sizes.append(size)
        return sizes

    def _option(self, target: Target, width: Width, cache: str, size: int) -> PlanOption:
        part = self._device_model(target, width, cache, size)
        room = capacity(part, width.vllm_config, target.accelerator, self.context_len)
        option = PlanOption(
            quantization=width.quantization,
            weights=width.name,
            kv_cache_dtype=cache,
            tensor_parallel_size=size,
            num_servers=target.num_devices // size,
            hosts_of_server=-(-size // devices_of_host(target)),
            device_weight_bytes=part.held_bytes,
            device_cache_bytes=room.cache_bytes,
            max_context=room.max_context,
            max_requests=room.max_requests,
            steps=(),
        )
        return dataclasses.replace(option, steps=tuple(self._steps(target, part, option))) if option.fits else option

    def _steps(self, target: Target, part: DeviceModel, option: PlanOption) -> Iterator[Step]:
        for batch_size in sorted({1, option.max_requests}):
            cost = part.decode(batch_size, self.context_len)
            yield make_step("decode", batch_size, batch_size, self.context_len, cost, target, option)
        chunk = min(self._step_tokens, self.context_len)
        yield make_step("prefill", 1, chunk, chunk, part.prefill(chunk), target, option)


def make_step(
    name: str, num_requests: int, num_tokens: int, context_len: int, cost: StepCost, target: Target, option: PlanOption
) -> Step:
    """A step of an option's servers, with its bound on a target; see `Step`."""
    least = bound(cost, target.accelerator)
    rate = option.num_servers * num_tokens / least.seconds
    return Step(name, num_requests, num_tokens, context_len, cost, least, rate)


def devices_of_host(target: Target) -> int:
    """How many of a target's devices one process can have: those of one host.

    A GPU server has 8. A TPU host has 4 chips (of TPU7x, 8 devices), but the hosts of v5e-8 and v6e-8 have all 8.
    """
    if target.accelerator.platform == "gpu" or target.accelerator.name == "tpu7x":
        return 8
    return 8 if target.accelerator.name in ("v5e", "v6e") and target.num_devices == 8 else 4


def _rank(option: PlanOption) -> tuple[Any, ...]:
    """Sorts options: first what runs, then what fits; wide caches, wide weights and many devices before others."""
    return (
        not option.can_run,
        not option.fits,
        option.kv_cache_dtype != "auto",
        option.width_rank,
        -option.tensor_parallel_size,
    )
