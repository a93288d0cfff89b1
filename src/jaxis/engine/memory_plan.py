"""Plan of the memory: the width of the weights and the length of the context that fit, before any weights are read.

Sizes follow from a model that is constructed without weights. Nothing is quantized silently: a plan includes a line
that states the choice and its reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxis.config import VllmConfig
from jaxis.config.quantization import HoldsWeights
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.cache_memory import free_device_bytes
from jaxis.engine.execution.cache_specs import kv_cache_specs
from jaxis.engine.execution.extra_memory import ExtraMemory
from jaxis.engine.execution.kv_cache import on_devices, unit_bytes
from jaxis.engine.memory_account import LOW_PRECISION, MemoryAccount, MemoryPlace, Width
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.errors import EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.host.machine import free_host_bytes
from jaxis.kernels import native
from jaxis.layers.module import JaxModule
from jaxis.layers.weight_bytes import weight_bytes
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.parallel.mesh import DATA_AXIS
from jaxis.parallel.stages import Stage

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


def plan_memory(
    args: EngineArgs,
    make_config: Callable[[EngineArgs], VllmConfig],
    meshes: Sequence[jax.sharding.Mesh],
    make_draft: Callable[[EngineArgs], tuple[JaxModule, VllmConfig] | None],
    shared: MemoryBudget | None,
    extra_memory: ExtraMemory,
    *,
    can_quantize: bool,
) -> MemoryPlan | None:
    """Chooses the widest weights that fit beside a useful context, and then the longest context that fits.

    Sizes count as the devices hold them: each data rank has the whole model but for what ranks share, and its own
    cache. Each pipeline stage must fit on its own devices, unless all stages share the memory of the host.

    Args:
      args: Requested arguments; a width, context or cache that was given is kept.
      make_config: Function from arguments to a configuration.
      meshes: Devices of each pipeline stage.
      make_draft: Function from arguments to the draft model, constructed without weights, and its configuration; it
        returns None if there is none, or if the model's own layers draft.
      shared: Budget of host memory that other engines share, on CPU; None is all that is free now.
      extra_memory: Extra memory of the engine's features.
      can_quantize: True for a checkpoint in floats; weights of others stay as they are.

    Returns:
      The plan; None for devices that do not report their memory.

    Raises:
      EngineError: The weights of a checkpoint do not fit, even in the lowest precision, and no width was requested; or
        the extra memory does not fit.
    """
    config = make_config(args)
    on_cpu = meshes[0].devices.flat[0].platform == "cpu"
    shared = shared if on_cpu else None
    if not on_cpu:
        free = free_device_bytes(meshes)
    else:
        free = free_host_bytes() if shared is None else shared.total_bytes
    if free is None:
        return None
    # On CPU, offloaded blocks take the same memory.
    kept = args.kv_offloading_bytes or 0
    budget = int(free * _CPU_SHARE) - _STEP_BYTES - kept if on_cpu else free
    own_budget = budget if shared is None else int(shared.share_bytes * _CPU_SHARE) - _STEP_BYTES - kept
    stages = [Stage(index, len(meshes)) for index in range(len(meshes))]

    def width_of(args: EngineArgs, quantization: str | None) -> Width:
        config = make_config(args)
        return Width(quantization, config, float_bytes=_float_bytes(config))

    def account_of(width: Width, args: EngineArgs) -> MemoryAccount:
        """Counts everything that the places hold, which on CPU are one; caches are those of the weights as stored."""
        draft = make_draft(args)
        sizes = [width.weight_bytes(mesh, stage) for mesh, stage in zip(meshes, stages, strict=True)]
        specs = [width.cache_specs(stage) for stage in stages]
        if draft is not None:
            model, draft_config = draft
            sizes[-1] += weight_bytes(model, float_bytes=_float_bytes(draft_config))
            specs[-1] = [*specs[-1], *kv_cache_specs(*draft)]
        if on_cpu:
            sizes, specs = [sum(sizes)], [[spec for own in specs for spec in own]]
        units = [unit_bytes(on_devices(own, meshes[0]), config, meshes[0]) for own in specs]
        return MemoryAccount(config, tuple(map(MemoryPlace, sizes, units)), meshes[0].shape[DATA_AXIS])

    width = width_of(args, None)
    extra_bytes = extra_memory.bytes_on(meshes, list(map(width.model, stages)), config.model_config.dtype, budget)
    kept, budget, own_budget = kept + extra_bytes, budget - extra_bytes, own_budget - extra_bytes
    account = account_of(width, args)
    sizes = {width.quantization: account.held_bytes}
    wanted = config.model_config.max_model_len
    needed = account.needed_bytes(wanted if args.max_model_len is not None else min(wanted, _MIN_CONTEXT))
    while account.cache_bytes(budget // len(account.places)) < needed and not _is_chosen(args):
        if not can_quantize or len(sizes) > len(LOW_PRECISION):
            raise EngineError(_does_not_fit(sizes, needed, budget))
        quantization = LOW_PRECISION[len(sizes) - 1]
        quantized_args = dataclasses.replace(args, quantization=quantization)
        width = width_of(quantized_args, quantization)
        account = account_of(width, quantized_args)
        sizes[width.quantization] = account.held_bytes
    memory, context = None, wanted
    if on_cpu:
        memory = max(needed, min(account.useful_bytes(), int((own_budget - account.held_bytes) * _CACHE_SHARE)))
        context = account.context_in(memory, meshes[0])
    line = _line(sizes, memory, context, wanted, free, is_chosen=_is_chosen(args), can_quantize=can_quantize)
    nbytes = account.held_bytes + (memory or 0) + _STEP_BYTES + kept if on_cpu else 0
    return MemoryPlan(width.quantization, context if context < wanted else None, memory, line, nbytes)


def _is_chosen(args: EngineArgs) -> bool:
    return args.quantization is not None or args.additional_config is not None


def _float_bytes(config: VllmConfig) -> int:
    """Returns the size of a float: native kernels keep a checkpoint's 16-bit floats, XLA uses the model's type."""
    is_packed = isinstance(config.quant_config, HoldsWeights)
    if is_packed or config.load_config.load_format == "dummy" or not native.usable():
        return np.dtype(config.model_config.dtype).itemsize
    hf_config = config.model_config.hf_config
    stored = hf_config.get("dtype", hf_config.get("torch_dtype"))
    if stored is None:  # many draft heads have no such key
        stored = max(TensorListing(config.model_config.model).values(), key=lambda info: info.nbytes).dtype
    return 4 if str(stored).endswith("float32") else 2


def _line(
    sizes: Mapping[str | None, int],
    memory: int | None,
    context: int,
    wanted: int,
    free: int,
    *,
    is_chosen: bool,
    can_quantize: bool,
) -> str:
    """Words the plan; `sizes` are those of weights as stored (None) and of what was tried, the chosen one last."""
    [*_, (quantization, num_bytes)] = sizes.items()
    size, has = human_bytes(num_bytes), human_bytes(free)
    if quantization is not None:
        stored = human_bytes(sizes[None])
        weights = (
            f"{quantization} weights of {size}, as they take {stored} as stored and {has} are free "
            "(--quantization none keeps them)"
        )
    elif is_chosen and num_bytes > free:
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


def _does_not_fit(sizes: Mapping[str | None, int], needed: int, budget: int) -> str:
    tried = [human_bytes(size) + (f" with {name}" if name else "") for name, size in sizes.items()]
    return (
        f"the model does not fit: its weights take {', '.join(tried)}, the KV cache at least {human_bytes(needed)}, "
        f"and {human_bytes(max(0, budget))} can be used: free memory, or give a smaller --max-model-len or model; "
        f"--quantization {[*sizes][-1] or 'none'} tries nevertheless"
    )
