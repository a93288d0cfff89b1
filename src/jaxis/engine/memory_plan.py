"""Plan of the memory: the width of the weights and the length of the context that fit, before any weights are read.

Sizes follow from the shapes of a model that is constructed without weights, and from the headers of a quantized
checkpoint's files. Nothing is quantized silently: a plan includes a line that states the choice and its reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxis.config import VllmConfig
from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.cache_memory import ACCELERATOR_MEMORY_SHARE
from jaxis.engine.execution.cache_specs import cache_specs, kv_cache_specs, own_cache_specs
from jaxis.engine.execution.extra_memory import ExtraMemory
from jaxis.engine.execution.kv_cache import (
    CPU_TOKENS_PER_SEQ,
    num_cache_blocks,
    on_devices,
    stage_share,
    unit_bytes,
)
from jaxis.engine.execution.state_cache import STATE_SHARE, num_state_slots, useful_slots
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.engine.scheduling.state_slots import MIN_SLOTS
from jaxis.errors import EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.host.machine import free_host_bytes
from jaxis.kernels import native
from jaxis.layers.module import JaxModule
from jaxis.layers.weight_bytes import weight_bytes
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.model_loader import construct_abstractly
from jaxis.parallel.mesh import DATA_AXIS
from jaxis.parallel.stages import Stage

QUANTIZATIONS = ("int8", "int4")
"""Quantizations to try, in this order, if weights do not fit as they are stored."""

# Share of the free memory that a plan may use; the rest is for programs, tokenizers and other processes.
_CPU_SHARE = 0.9
_STEP_BYTES = 256 * 2**20
# Share of the memory left beside the weights that the KV cache may take.
_CACHE_SHARE = 0.75
# Context, if none is requested, below which weights are quantized.
_MIN_CONTEXT = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """A plan of loading a model.

    Attributes:
      quantization: "int8" or "int4"; None: as stored, or as requested.
      max_model_len: Most tokens of a request; None: the same as without a plan.
      kv_cache_memory: Bytes of the KV cache; None leaves it to the engine.
      line: Text with the choice, its reason, and the options that choose otherwise.
      nbytes: Approximate host memory that the engine will take on CPU; 0 on other devices.
    """

    quantization: str | None
    max_model_len: int | None
    kv_cache_memory: int | None
    line: str
    nbytes: int

    def apply(self, args: EngineArgs) -> EngineArgs:
        return dataclasses.replace(
            args,
            quantization=self.quantization or args.quantization,
            max_model_len=self.max_model_len or args.max_model_len,
            kv_cache_memory=self.kv_cache_memory or args.kv_cache_memory,
        )


@dataclass(frozen=True)
class _Width:
    """Sizes of each stage's weights on all its devices, in one quantization (None: as stored or requested)."""

    quantization: str | None
    stage_bytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.stage_bytes)


@dataclass(frozen=True)
class PlannedDraft:
    """A draft model with a checkpoint of its own.

    Attributes:
      model: Model, constructed without weights.
      config: Configuration of the model.
      stored_bytes: Size of a checkpoint whose weights stay as they are; None for one in floats.
    """

    model: JaxModule
    config: VllmConfig
    stored_bytes: int | None

    @property
    def weight_bytes(self) -> int:
        """Size of the draft model's weights once loaded."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return weight_bytes(self.model, _float_bytes(self.config))


def plan_memory(
    args: EngineArgs,
    make_config: Callable[[EngineArgs], VllmConfig],
    meshes: Sequence[jax.sharding.Mesh],
    stored_bytes: int | None,
    make_draft: Callable[[EngineArgs], PlannedDraft | None],
    shared: MemoryBudget | None,
    extra_memory: ExtraMemory,
) -> MemoryPlan | None:
    """Chooses the widest weights that fit beside a useful context, and then the longest context that fits.

    Sizes count as the devices hold them: each data rank has the whole model but for what ranks share, and its own
    cache. Each pipeline stage must fit on its own devices, unless all stages share the memory of the host.

    Args:
      args: Requested arguments; a width, context or cache that was given is kept.
      make_config: Function from arguments to a configuration.
      meshes: Devices of each pipeline stage.
      stored_bytes: Size of a checkpoint whose weights stay as they are; None for one in floats, which can be quantized.
      make_draft: Function from arguments to the draft model; it returns None if there is none, or if the model's own
        layers draft.
      shared: Budget of host memory that other engines share, on CPU; None is all that is free now.
      extra_memory: Extra memory of the engine's features.

    Returns:
      The plan; None for devices that do not report their memory.

    Raises:
      EngineError: The weights of a checkpoint do not fit, even in the lowest precision, and no width was requested; or
        the extra memory does not fit.
    """
    config = make_config(args)
    mesh = meshes[0]
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shared = shared if on_cpu else None
    free = _free_device_bytes(meshes) if not on_cpu else free_host_bytes() if shared is None else shared.total_bytes
    if free is None:
        return None
    # On CPU, offloaded blocks take the same memory.
    kept = args.kv_offloading_bytes or 0
    budget = int(free * _CPU_SHARE) - _STEP_BYTES - kept if on_cpu else free
    own_budget = budget if shared is None else int(shared.share_bytes * _CPU_SHARE) - _STEP_BYTES - kept
    draft = make_draft(args)
    models = _stage_models(config, len(meshes))
    extra_bytes = extra_memory.bytes_on(meshes, models, config.model_config.dtype, budget)
    kept, budget, own_budget = kept + extra_bytes, budget - extra_bytes, own_budget - extra_bytes
    specs = [cache_specs(model, config) if len(models) == 1 else own_cache_specs(model) for model in models]
    if draft is not None:
        specs[-1] = [*specs[-1], *kv_cache_specs(draft.model, draft.config)]
    units = [unit_bytes(on_devices(own, mesh), config, mesh) for own in specs]
    cache = _Cache(config, *unit_bytes(on_devices([spec for own in specs for spec in own], mesh), config, mesh), mesh)
    # On CPU, the stages share one memory.
    shares = (1.0,) if on_cpu else tuple(stage_share(unit, (cache.per_block, cache.per_slot)) for unit in units)
    wanted = config.model_config.max_model_len
    needed = cache.bytes_for(wanted if args.max_model_len is not None else min(wanted, _MIN_CONTEXT))

    def width(quantization: str | None, models: Sequence[JaxModule], draft: PlannedDraft | None) -> _Width:
        float_bytes = 2 if quantization is not None else _float_bytes(config)
        sizes = [weight_bytes(model, float_bytes, mesh) for model, mesh in zip(models, meshes, strict=True)]
        if stored_bytes is not None:
            once = sum(weight_bytes(model, float_bytes) for model in models)
            sizes = [size * stored_bytes // once for size in sizes]
        if draft is not None:
            sizes[-1] += draft.weight_bytes
        return _Width(quantization, (sum(sizes),) if on_cpu else tuple(sizes))

    def fits(width: _Width) -> bool:
        most = budget // len(shares)
        return all(size + share * needed <= most for size, share in zip(width.stage_bytes, shares, strict=True))

    widths = [width(None, models, draft)]
    while not fits(widths[-1]) and not _is_chosen(args):
        tried = len(widths) - 1
        if stored_bytes is not None or tried == len(QUANTIZATIONS):
            raise EngineError(_does_not_fit(widths, needed, budget))
        quantized_args = dataclasses.replace(args, quantization=QUANTIZATIONS[tried])
        quantized = _stage_models(make_config(quantized_args), len(meshes))
        widths.append(width(QUANTIZATIONS[tried], quantized, make_draft(quantized_args)))
    memory, context = None, wanted
    if on_cpu:
        memory = cache.memory(at_least=needed, left=own_budget - widths[-1].nbytes)
        context = cache.context(memory)
    line = _line(widths, memory, context, wanted, free, is_chosen=_is_chosen(args), can_quantize=stored_bytes is None)
    nbytes = widths[-1].nbytes + (memory or 0) + _STEP_BYTES + kept if on_cpu else 0
    return MemoryPlan(widths[-1].quantization, context if context < wanted else None, memory, line, nbytes)


@dataclass(frozen=True)
class _Cache:
    """Sizes of a configuration's caches: of a block and of a state slot of one data rank, in all layers.

    Attributes:
      mesh: Devices of a pipeline stage, which hold all data ranks.
    """

    config: VllmConfig
    per_block: Mapping[AttentionSpan, int]
    per_slot: int
    mesh: jax.sharding.Mesh

    @property
    def num_ranks(self) -> int:
        return self.mesh.shape[DATA_AXIS]

    def bytes_for(self, num_tokens: int) -> int:
        """Returns the requested size, or else the size of caches for a sequence of `num_tokens` and its states."""
        num_blocks = -(-num_tokens // self.config.cache_config.block_size)
        paged, states = num_blocks * sum(self.per_block.values()), MIN_SLOTS * self.per_slot
        # States may take no more than their share of the caches.
        needed = max(paged + states, math.ceil(states / STATE_SHARE)) if self.per_block else states
        return self.config.cache_config.kv_cache_memory_bytes or self.num_ranks * needed

    def memory(self, *, at_least: int, left: int) -> int:
        """Returns the size of caches for one longest sequence, or for short ones of all that run, limited by `left`."""
        short = self.config.scheduler_config.max_num_seqs * CPU_TOKENS_PER_SEQ
        useful = self.bytes_for(max(self.config.model_config.max_model_len, short))
        useful += self.num_ranks * self.per_slot * (useful_slots(self.config) - MIN_SLOTS)
        return max(at_least, min(useful, int(left * _CACHE_SHARE)))

    def context(self, memory: int) -> int:
        cache_config = dataclasses.replace(self.config.cache_config, kv_cache_memory_bytes=memory)
        config = dataclasses.replace(self.config, cache_config=cache_config)
        of_rank = memory // self.num_ranks
        state_bytes = self.per_slot * num_state_slots(config, self.per_slot, of_rank, attends=bool(self.per_block))
        return num_cache_blocks(config, self.per_block, self.mesh, state_bytes=state_bytes, memory=of_rank)[1]


def _stage_models(config: VllmConfig, num_stages: int) -> list[JaxModule]:
    stages = [Stage(index, num_stages) for index in range(num_stages)]
    return [construct_abstractly(config, check_config=False, stage=stage) for stage in stages]


def _is_chosen(args: EngineArgs) -> bool:
    return args.quantization is not None or args.additional_config is not None


def _float_bytes(config: VllmConfig) -> int:
    """Returns the size of a float: native kernels keep a checkpoint's 16-bit floats, XLA uses the model's type."""
    if config.load_config.load_format == "dummy" or not native.usable():
        return np.dtype(config.model_config.dtype).itemsize
    hf_config = config.model_config.hf_config
    stored = hf_config.get("dtype", hf_config.get("torch_dtype"))
    if stored is None:  # many draft heads have no such key
        stored = max(TensorListing(config.model_config.model).values(), key=lambda info: info.nbytes).dtype
    return 4 if str(stored).endswith("float32") else 2


def _free_device_bytes(meshes: Sequence[jax.sharding.Mesh]) -> int | None:
    free = []
    for device in (device for mesh in meshes for device in mesh.devices.flat):
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        free.append(int(stats["bytes_limit"] * ACCELERATOR_MEMORY_SHARE) - stats.get("bytes_in_use", 0))
    return max(0, min(free)) * len(free)


def _line(
    widths: list[_Width],
    memory: int | None,
    context: int,
    wanted: int,
    free: int,
    *,
    is_chosen: bool,
    can_quantize: bool,
) -> str:
    chosen, size, has = widths[-1], human_bytes(widths[-1].nbytes), human_bytes(free)
    if chosen.quantization is not None:
        stored = human_bytes(widths[0].nbytes)
        weights = (
            f"{chosen.quantization} weights of {size}, as they take {stored} as stored and {has} are free "
            "(--quantization none keeps them)"
        )
    elif is_chosen and chosen.nbytes > free:
        weights = f"weights as asked for, although they take {size} and {has} are free"
    else:
        more = " (--quantization makes them smaller)" if can_quantize else ""
        weights = f"weights {'as asked for' if is_chosen else 'as stored'}, {size} of {has} free{more}"
    if context < wanted:
        length = f"{context} tokens of context, not {wanted}, which is what fits"
    else:
        length = f"{context} tokens of context"
    cache = "" if memory is None else f" into {human_bytes(memory)} of KV cache"
    return f"memory: {weights}; {length}{cache} (--max-model-len, --kv-cache-memory)"


def _does_not_fit(widths: list[_Width], needed: int, budget: int) -> str:
    sizes = [human_bytes(widths[0].nbytes)]
    sizes += [f"{human_bytes(width.nbytes)} with {width.quantization}" for width in widths[1:]]
    return (
        f"the model does not fit: its weights take {', '.join(sizes)}, the KV cache at least {human_bytes(needed)}, "
        f"and {human_bytes(max(0, budget))} can be used: free memory, or give a smaller --max-model-len or model; "
        f"--quantization {widths[-1].quantization or 'none'} tries nevertheless"
    )
