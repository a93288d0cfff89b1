"""A plan whose steps were compiled for its devices: their bytes and exchanges replace those of the arithmetic."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable

import jax

from jaxis.compilation.program_text import Collective
from jaxis.compilation.step_costs import StepCompiler, StepCosts
from jaxis.config import VllmConfig
from jaxis.errors import ConfigError, EngineError
from jaxis.parallel.mesh import DATA_AXIS, MODEL_AXIS
from jaxis.planning.exchanges import Exchange
from jaxis.planning.layout import Layout
from jaxis.planning.plan import CACHE_DTYPES, CompiledStep, Plan, Planner, PlanOption, Step, make_step

_ATTENTION = re.compile("attention|cache")  # in the names of kernels


def with_compiled_steps(plan: Plan, planner: Planner, on_stage: Callable[[str], object] = lambda _: None) -> Plan:
    """Returns the plan with the steps of its chosen option compiled by the target's own compiler.

    Facts that the compiler cannot tell stay arithmetic: the context that a step reads, the experts that it hits, and
    its operations, since kernels of jaxis hide theirs.

    `on_stage` is called with a short description of each step before it is compiled.

    Raises:
      ConfigError: The compiler is not installed, or nothing fits.
      EngineError: A step does not compile.
    """
    option = plan.chosen
    if not option.fits:
        raise ConfigError("nothing to compile: the model does not fit; leave --compile out for the figures")
    layout = option.layout
    if layout.pipeline_parallel_size > 1:
        raise ConfigError("--compile compiles no pipeline stages: leave it, or --pipeline-parallel-size, out")
    devices = plan.target.devices()[: layout.num_devices]
    on_stage(f"Constructing the model for {plan.target}")
    compiler = StepCompiler(_engine_config(planner.width_of(option).vllm_config, plan, option), devices)
    steps = []
    for step in option.steps:
        num_tokens = -(-step.num_tokens // layout.data_parallel_size)  # of each data rank
        on_stage(f"Compiling a step of {num_tokens} tokens for {plan.target}")
        try:
            costs = compiler.step(num_tokens)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise EngineError(f"a step of {num_tokens} tokens does not compile for {plan.target}: {reason}") from None
        needed = compiler.reads.of_step(step.num_tokens) + compiler.reads.head
        steps.append(_with_costs(step, costs, needed, sum(compiler.cache_bytes), plan, option))
    chosen = dataclasses.replace(option, steps=tuple(steps))
    return dataclasses.replace(plan, options=(chosen, *plan.options[1:]))


def exchanges_of(collectives: Iterable[Collective], layout: Layout) -> tuple[Exchange, ...]:
    """Collects the exchanges of a compiled step of a server with this layout; exchanges in loops count once."""
    numbers: Counter[tuple[str, tuple[str, ...], int, float]] = Counter()
    for each in collectives:
        size = len(each.group) or layout.num_devices
        if size > 1:
            nbytes = each.nbytes * (size if each.opcode == "reduce-scatter" else 1)  # its result is one device's part
            numbers[each.opcode, _axes(each.group, layout), size, nbytes] += 1
    return tuple(
        Exchange("compiled", opcode, axes, size, nbytes, number)
        for (opcode, axes, size, nbytes), number in numbers.items()
    )


def _axes(group: tuple[int, ...], layout: Layout) -> tuple[str, ...]:
    """Returns the mesh axes along which a group's devices lie, given by their places in the mesh."""
    group = group or tuple(range(layout.num_devices))
    ranks, places = zip(*(divmod(place, layout.tensor_parallel_size) for place in group), strict=True)
    return tuple(axis for axis, along in ((DATA_AXIS, ranks), (MODEL_AXIS, places)) if len(set(along)) > 1)


def _engine_config(config: VllmConfig, plan: Plan, option: PlanOption) -> VllmConfig:
    num_seqs = option.max_requests // option.layout.data_parallel_size
    sizes = dataclasses.asdict(option.layout)
    del sizes["pipeline_parallel_size"]  # 1
    return dataclasses.replace(
        config,
        model_config=dataclasses.replace(config.model_config, max_model_len=plan.context_len),
        cache_config=dataclasses.replace(
            config.cache_config,
            cache_dtype=CACHE_DTYPES[option.kv_cache_dtype],
            kv_cache_memory_bytes=option.device_cache_bytes * option.layout.num_devices,
        ),
        scheduler_config=dataclasses.replace(
            config.scheduler_config,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(config.scheduler_config.max_num_batched_tokens, num_seqs),
        ),
        parallel_config=dataclasses.replace(config.parallel_config, **sizes),
    )


def _with_costs(
    step: Step, costs: StepCosts, needed_bytes: int, cache_bytes: int, plan: Plan, option: PlanOption
) -> Step:
    """Returns the step with the costs of its compiled programs.

    `needed_bytes` are the most bytes of weights that they read: kernels count the experts of tokens that share none.
    """
    programs = (costs.forward, costs.sampler)
    texts = [program.text for program in programs]
    exchanges = [each for text in texts for each in text.collectives]
    hbm_bytes = sum(text.hbm_bytes for text in texts)
    # What kernels of attention read depends on the context; of others, on the experts, of which they count the most.
    products = [each for text in texts for each in text.kernels if not _ATTENTION.search(each.name)]
    moved = hbm_bytes + sum(each.nbytes or 0 for each in products) - max(0, needed_bytes - step.cost.weight_bytes)
    cost = dataclasses.replace(
        step.cost,
        weight_bytes=max(step.cost.weight_bytes, moved),
        exchanges=exchanges_of(exchanges, option.layout),
    )
    compiled = CompiledStep(
        hbm_bytes=hbm_bytes,
        loop_hbm_bytes=sum(text.loop_hbm_bytes for text in texts),
        temporary_bytes=max(program.memory.temporaries for program in programs),
        num_collectives=len(exchanges),
        num_loops=sum(text.num_loops for text in texts),
        caches_are_aliased=costs.forward.memory.aliased >= cache_bytes,
        largest_copy_bytes=max((copy.nbytes for text in texts for copy in text.copies), default=0),
    )
    made = make_step(step.name, step.num_requests, step.num_tokens, step.context_len, [cost], plan.target, option)
    return dataclasses.replace(made, compiled=compiled)
