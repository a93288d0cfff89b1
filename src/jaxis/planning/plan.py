"""Plans to serve a model on accelerators: weights and layouts that fit, and the least time of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.bringup.analyze.source import ModelSource
from jaxis.compilation.targets import Target
from jaxis.config.expert_counts import num_experts
from jaxis.engine.execution.cache_memory import usable_bytes
from jaxis.engine.memory_account import LOW_PRECISION, MemoryAccount, Width
from jaxis.errors import ConfigError
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.module import JaxModule
from jaxis.planning.device_model import DeviceModel, device_model
from jaxis.planning.layout import ANY_LAYOUT, Layout, WantedLayout, layouts
from jaxis.planning.roofline import Bound, StepCost, pipeline_bound
from jaxis.planning.widths import widths

DEFAULT_CONTEXT_LEN = 4096
CACHE_DTYPES = {"auto": None, "int8": jnp.int8}
"""Types of the cache by their names for `--kv-cache-dtype`; "auto" is the model's."""


@dataclass(frozen=True)
class CompiledStep:
    """Costs of a step's programs on each device, from the target's compiler.

    Attributes:
      hbm_bytes: Bytes read from and written to memory, without jaxis's own kernels and without loops.
      loop_hbm_bytes: Bytes of the bodies of loops, each once.
      num_loops: Loops of unknown length.
      largest_copy_bytes: Bytes of the largest array that is only moved; 0 if none is.
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
      num_requests: Requests that take part, on the devices of one server.
      context_len: Tokens that each request has at its end.
      cost: Work of a device; with several pipeline stages, of the stage that takes longest.
      seconds: Least time of the step, through all stages.
      tokens_per_second: Most tokens of all servers together, with as many steps at once as there are stages.
      compiled: The compiler's figures; None if the cost is arithmetic.
    """

    name: str
    num_requests: int
    num_tokens: int
    context_len: int
    cost: StepCost
    bound: Bound
    seconds: float
    tokens_per_second: float
    compiled: CompiledStep | None = None


@dataclass(frozen=True)
class PlanOption:
    """One way to serve the model.

    Attributes:
      quantization: Value for `--quantization`; None leaves weights as stored.
      device_weight_bytes: Bytes of the weights on each device; with several stages, on a device that has most.
      device_place_bytes: Bytes on each device for adapters' places.
      device_cache_bytes: Bytes that are left for the cache on each device; with several stages the average that
        each uses; negative if the weights do not fit.
      max_context: Tokens of the longest single request; 0 if none fits.
      max_requests: Requests of the asked-for length that a server holds at once, on all its data ranks.
      steps: A decode of one request, a decode of all that fit, and a prefill of the most tokens of a step; none if not
        even one request fits.
    """

    quantization: str | None
    weights: str
    kv_cache_dtype: str
    layout: Layout
    num_servers: int
    hosts_of_server: int
    device_weight_bytes: int
    device_place_bytes: int
    device_cache_bytes: int
    max_context: int
    max_requests: int
    steps: tuple[Step, ...]

    @property
    def fits(self) -> bool:
        """True if a request of the asked-for length fits."""
        return self.max_requests > 0

    @property
    def width_rank(self) -> int:
        """0 for weights as stored (or dequantized), more for those of lower precision."""
        return 1 + LOW_PRECISION.index(self.quantization) if self.quantization in LOW_PRECISION else 0


@dataclass(frozen=True)
class WantedPlaces:
    """Room for adapters' places, and the options of `jaxis serve` that ask for it.

    `bytes_of` computes its bytes on each device from an abstract model and the type in which it computes.
    """

    bytes_of: Callable[[JaxModule, DTypeLike], int]
    options: str


@dataclass(frozen=True)
class Wanted:
    """Requirements for a plan.

    None leaves a choice to the plan.

    Attributes:
      context_len: Tokens that each request grows to; None is 4,096, or the model's longest.
      quantization: Value of `--quantization`: int8, int4, dequantize, or none.
      dtype: Type of activations and of weights in floats; None is the checkpoint's.
    """

    context_len: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    layout: WantedLayout = ANY_LAYOUT
    places: WantedPlaces | None = None


@dataclass(frozen=True)
class Plan:
    """A plan to serve a model on a target.

    Attributes:
      options: Options, best first: those that fit on one host, then those that need several hosts, then those that do
        not fit.
    """

    target: Target
    wanted: Wanted
    context_len: int
    max_model_len: int
    prefill_tokens: int
    options: tuple[PlanOption, ...]

    @property
    def chosen(self) -> PlanOption:
        """The best option: the widest weights that fit, on the most devices of one host, or of several."""
        return self.options[0]


class Planner:
    """Plans for one model, which is constructed once for each width of its weights."""

    def __init__(self, source: ModelSource, wanted: Wanted) -> None:
        """Constructs the model in each wanted width. Raises ConfigError if jaxis cannot run it so."""
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
        """Plans for a target. Raises ConfigError if the devices cannot be shared as wanted."""
        options = sorted(self._options(target), key=_rank)
        prefill_tokens = min(self._step_tokens, self.context_len)
        return Plan(target, self._wanted, self.context_len, self._longest, prefill_tokens, tuple(options))

    def device_model(self, target: Target, layout: Layout | None = None) -> DeviceModel:
        """Computes a device's part of the stored model. By default, all devices share each layer, without pipeline
        stages.

        Raises ConfigError if the model cannot be spread over so many devices.
        """
        [part] = self._stages(target, self.widths[0], "auto", layout or Layout(target.num_devices))
        return part

    def width_of(self, option: PlanOption) -> Width:
        return next(width for width in self.widths if width.quantization == option.quantization)

    def stages(self, target: Target, layout: Layout) -> list[DeviceModel]:
        """Computes a device's part of the stored model for each pipeline stage; raises as `device_model` does."""
        return self._stages(target, self.widths[0], "auto", layout)

    def _stages(self, target: Target, width: Width, cache: str, layout: Layout) -> list[DeviceModel]:
        dtype = CACHE_DTYPES[cache] or width.vllm_config.model_config.dtype
        return [device_model(width, target.accelerator, layout, dtype, stage) for stage in layout.stages]

    def _options(self, target: Target) -> Iterator[PlanOption]:
        specs = self.widths[0].cache_specs()
        holds_biases = any(isinstance(spec, KVCacheSpec) and spec.holds_biases for spec in specs)
        caches = ("auto",) if holds_biases else tuple(CACHE_DTYPES)
        if self._wanted.kv_cache_dtype is not None:
            caches = (self._wanted.kv_cache_dtype,)
        for layout in self._layouts(target):
            for width in self.widths:
                for cache in caches:
                    yield self._option(target, width, cache, layout)

    def _layouts(self, target: Target) -> Sequence[Layout]:
        wanted, width = self._wanted.layout, self.widths[0]
        found = []
        for layout in layouts(target, wanted, num_experts(width.vllm_config.model_config.hf_config.get_text_config())):
            try:
                self._stages(target, width, "auto", layout)
            except ConfigError:  # its heads, or its context, cannot be split so
                if wanted.tensor_parallel_size is not None or layout.decode_context_parallel_size > 1:
                    raise
                if layout.tensor_parallel_size == 1:  # nothing else can be, either
                    raise
                continue
            found.append(layout)
        return found

    def _option(self, target: Target, width: Width, cache: str, layout: Layout) -> PlanOption:
        stages = self._stages(target, width, cache, layout)
        places = self._wanted.places
        dtype = width.vllm_config.model_config.dtype
        place_bytes = 0 if places is None else max(places.bytes_of(width.model(each), dtype) for each in layout.stages)
        account = MemoryAccount(width.vllm_config, [part.place(place_bytes) for part in stages])
        usable = usable_bytes(target.accelerator.usable_bytes)
        max_requests = 0
        if (max_context := account.longest_context(usable)) >= self.context_len:
            max_requests = account.most_requests(usable, self.context_len)
        option = PlanOption(
            quantization=width.quantization,
            weights=width.name,
            kv_cache_dtype=cache,
            layout=layout,
            num_servers=target.num_devices // layout.num_devices,
            hosts_of_server=layout.num_hosts(target),
            device_weight_bytes=max(part.held_bytes for part in stages),
            device_place_bytes=place_bytes,
            device_cache_bytes=account.cache_bytes(usable) // len(stages),
            max_context=max_context,
            max_requests=max_requests * layout.data_parallel_size,
            steps=(),
        )
        return dataclasses.replace(option, steps=tuple(self._steps(target, stages, option))) if option.fits else option

    def _steps(self, target: Target, stages: Sequence[DeviceModel], option: PlanOption) -> Iterator[Step]:
        for batch_size in sorted({1, option.max_requests}):
            # Each of the steps that are in flight at once has its share of the requests.
            share = -(-batch_size // len(stages))
            costs = [part.decode(share, self.context_len) for part in stages]
            yield make_step("decode", batch_size, batch_size, self.context_len, costs, target, option)
        chunk = min(self._step_tokens, self.context_len)
        ranks = option.layout.data_parallel_size
        costs = [part.prefill(chunk) for part in stages]
        yield make_step("prefill", ranks, ranks * chunk, chunk, costs, target, option)


def make_step(
    name: str,
    num_requests: int,
    num_tokens: int,
    context_len: int,
    costs: Sequence[StepCost],
    target: Target,
    option: PlanOption,
) -> Step:
    """Makes a step of an option's servers, with its bound on a target.

    `name`, `num_requests`, `num_tokens` and `context_len` are the attributes of `Step`; `costs` has one device of each
    pipeline stage.
    """
    least = pipeline_bound(costs, target, option.layout)
    # A decode's tokens are those of all steps in flight, a prefill's those of one.
    num_steps = min(len(costs), num_requests) if name == "decode" else 1
    period = max(num_steps * least.slowest.seconds, least.seconds if name == "decode" else 0.0)
    rate = option.num_servers * num_tokens / period
    return Step(name, num_requests, num_tokens, context_len, least.cost, least.slowest, least.seconds, rate)


def _rank(option: PlanOption) -> tuple[Any, ...]:
    """Sorts options: fitting, on one host; then wide caches, wide weights, many devices, most tokens/s first."""
    return (
        not option.fits,
        option.hosts_of_server > 1,
        option.kv_cache_dtype != "auto",
        option.width_rank,
        -option.layout.num_devices,
        -max((step.tokens_per_second for step in option.steps if step.name == "decode"), default=0.0),
        option.layout.data_parallel_size,
    )
