"""A plan in words, and as JSON values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxis.bench.text import format_number
from jaxis.engine.execution.cache_memory import usable_bytes
from jaxis.host.byte_size import human_bytes
from jaxis.host.json_object import json_object_text
from jaxis.planning.layout import options_of
from jaxis.planning.plan import CompiledStep, Plan, PlanOption, Step

SCHEMA = 2
"""Version of the JSON that `PlanReport.to_json` writes; incremented when a field changes its meaning or is removed."""


_HOSTS_PAGE = "docs/several-machines.md"
# Of a layout, as arguments of the engine.


@dataclass(frozen=True)
class PlanReport:
    """The result of `jaxis plan`, with a plan for each target."""

    model: str
    architectures: tuple[str, ...]
    plans: tuple[Plan, ...]

    def to_json(self) -> str:
        """Returns one JSON object, described in docs/accelerators.md."""
        fits = [plan.chosen.fits for plan in self.plans]
        status = "fits" if all(fits) else "fits_some" if any(fits) else "does_not_fit"
        plans = [_plan_json(plan) for plan in self.plans]
        facts = {"schema": SCHEMA, "status": status, "model": self.model, "architectures": self.architectures}
        return json_object_text(facts | {"plans": plans})


def data_sheet(plan: Plan) -> str:
    """Describes a target's devices in one line."""
    target, device = plan.target, plan.target.accelerator
    rates = ", ".join(f"{rate / 1e12:.0f} TFLOP/s {dtype}" for dtype, rate in device.flops.items())
    return (
        f"{target.num_devices} x {device.device_kind}, each {human_bytes(device.usable_bytes)} usable of "
        f"{human_bytes(device.memory_bytes)}, {device.memory_bandwidth / 1e9:.0f} GB/s, {rates}, sends "
        f"{device.interconnect_bandwidth / 1e9:.0f} GB/s"
    )


def verdict(plan: Plan) -> str:
    """States in one sentence whether and how the model fits."""
    chosen = plan.chosen
    if not chosen.fits:
        smallest = min(plan.options, key=lambda option: option.device_weight_bytes)
        usable = usable_bytes(plan.target.accelerator.usable_bytes)
        return (
            f"does not fit: {smallest.weights} weights over {smallest.layout.in_words} take "
            f"{human_bytes(smallest.device_weight_bytes)} of {human_bytes(usable)} on each, and a request of "
            f"{plan.context_len} tokens{_and_places(smallest)} must fit beside them"
        )
    what = f"{chosen.weights} weights over {chosen.layout.in_words}"
    if chosen.hosts_of_server > 1:
        what += f" of {chosen.hosts_of_server} hosts"
    if chosen.num_servers > 1:
        what = f"{chosen.num_servers} servers, each with {what}"
    if chosen.kv_cache_dtype != "auto":
        what += f", {chosen.kv_cache_dtype} cache"
    return f"fits: {what}"


def _and_places(option: PlanOption) -> str:
    return f" and {human_bytes(option.device_place_bytes)} for adapters" if option.device_place_bytes else ""


def remarks(plan: Plan) -> list[str]:
    """Lists facts that a reader should know about the choice."""
    chosen, notes = plan.chosen, []
    if chosen.hosts_of_server > 1:
        notes.append(f"several hosts have not been tried on such devices: see {_HOSTS_PAGE}")
    elif (other := _best_over_hosts(plan)) is not None:
        notes.append(
            f"{other.weights} weights over {other.layout.in_words} of {other.hosts_of_server} hosts: "
            f"{other.max_requests} requests, {format_number(_total_rate(other))} tokens/s at most; not chosen, since "
            f"several hosts have not been tried on such devices: see {_HOSTS_PAGE}"
        )
    if chosen.layout.pipeline_parallel_size > 1:
        notes.append(
            "each token goes through all stages, one after the other, so one request gets no faster by them; of many, "
            "each stage has its share at any time"
        )
    if chosen.device_place_bytes:
        size = human_bytes(chosen.device_place_bytes)
        notes.append(f"each device holds {size} for adapters; what they add to a step is not counted")
    used = chosen.layout.num_devices * chosen.num_servers
    if used < plan.target.num_devices:
        notes.append(f"{plan.target.num_devices - used} devices are left over")
    if chosen.num_servers > 1:
        notes.append("several servers need a load balancer in front of them; tokens/s are those of all together")
    return notes


def command(report: PlanReport, plan: Plan) -> str | None:
    """Returns the command that starts one server of the chosen option, on its first host; None if it does not fit."""
    chosen = plan.chosen
    if not chosen.fits:
        return None
    parts = ["jaxis serve", report.model, *filter(None, [options_of(chosen.layout)])]
    if chosen.hosts_of_server > 1:
        parts.append(f"--nnodes {chosen.hosts_of_server} --node-rank 0 --master-addr ADDRESS")
    if plan.wanted.dtype is not None:
        parts.append(f"--dtype {plan.wanted.dtype}")
    if chosen.quantization is not None:
        parts.append(f"--quantization {chosen.quantization}")
    if chosen.kv_cache_dtype != "auto":
        parts.append(f"--kv-cache-dtype {chosen.kv_cache_dtype}")
    if plan.wanted.places is not None:
        parts.append(plan.wanted.places.options)
    parts += [
        f"--max-model-len {plan.context_len}",
        f"--max-num-seqs {chosen.max_requests // chosen.layout.data_parallel_size}",
    ]
    return " ".join(parts)


def step_name(step: Step) -> str:
    if step.name == "prefill":
        ranks = f"{step.num_requests} x " if step.num_requests > 1 else ""
        return f"prefill of {ranks}{step.context_len} tokens"
    return f"decode, {step.num_requests} request{'s' if step.num_requests > 1 else ''}"


def source_line(plan: Plan) -> str:
    """Names the source of a plan's costs."""
    if any(step.compiled is not None for step in plan.chosen.steps):
        return "read from compiled programs, divided by the data sheet's rates; not measured"
    return "arithmetic on shapes, divided by the data sheet's rates; not measured"


def compiled_line(compiled: CompiledStep) -> str:
    """Describes a step by the compiler's figures."""
    parts = [f"{human_bytes(compiled.hbm_bytes)} through memory besides context"]
    if compiled.loop_hbm_bytes:
        parts.append(f"{human_bytes(compiled.loop_hbm_bytes)} in each round of {compiled.num_loops} loops")
    parts.append(f"{human_bytes(compiled.temporary_bytes)} of temporaries")
    parts.append("caches in place" if compiled.caches_are_aliased else "caches NOT updated in place")
    parts.append(f"largest copy {human_bytes(compiled.largest_copy_bytes)}")
    if compiled.num_collectives:
        parts.append(f"{compiled.num_collectives} exchanges")
    return ", ".join(parts)


def decode_rates(option: PlanOption) -> tuple[float, float] | None:
    """Returns the most tokens per second of one request, and of all requests of all servers; None if nothing fits."""
    decodes = [step for step in option.steps if step.name == "decode"]
    if not decodes:
        return None
    return 1 / decodes[0].seconds, decodes[-1].tokens_per_second


def _best_over_hosts(plan: Plan) -> PlanOption | None:
    """Returns the best option that needs several hosts, to be named beside the chosen one, which needs one.

    None if it has no wider weights and serves no faster.
    """
    several = [
        option
        for option in plan.options
        if option.fits and option.hosts_of_server > 1 and option.kv_cache_dtype == plan.chosen.kv_cache_dtype
    ]
    if not several or not plan.chosen.fits:
        return None
    best = several[0]
    is_better = best.width_rank < plan.chosen.width_rank or _total_rate(best) > _total_rate(plan.chosen)
    return best if is_better else None


def _total_rate(option: PlanOption) -> float:
    rates = decode_rates(option)
    return 0.0 if rates is None else rates[1]


def _plan_json(plan: Plan) -> dict[str, Any]:
    target, device = plan.target, plan.target.accelerator
    return {
        "target": {
            "name": str(target),
            "num_devices": target.num_devices,
            **{field.name: getattr(device, field.name) for field in dataclasses.fields(device) if field.name != "name"},
        },
        "context_len": plan.context_len,
        "max_model_len": plan.max_model_len,
        "prefill_tokens": plan.prefill_tokens,
        "fits": plan.chosen.fits,
        "verdict": verdict(plan),
        "options": [_option_json(option) for option in plan.options],
    }


def _option_json(option: PlanOption) -> dict[str, Any]:
    facts = dataclasses.asdict(option) | dataclasses.asdict(option.layout) | {"fits": option.fits}
    del facts["layout"]
    return facts | {"steps": [_step_json(step) for step in option.steps]}


def _step_json(step: Step) -> dict[str, Any]:
    facts = dataclasses.asdict(step)
    cost, least = facts.pop("cost"), facts.pop("bound")
    for exchange, each in zip(cost["exchanges"], step.cost.exchanges, strict=True):
        exchange["sent_bytes"] = each.sent_bytes
    totals = {"sent_bytes": step.cost.sent_bytes, "binds": step.bound.binds}
    return facts | cost | least | totals
