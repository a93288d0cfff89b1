"""A plan to serve a model on this machine: memory and times of each width of its weights, before any download."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.bench.text import format_number, format_table
from jaxis.bringup.analyze.source import ModelSource
from jaxis.engine.execution.cache_memory import usable_bytes
from jaxis.engine.memory_account import LOW_PRECISION, MemoryAccount, Width
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.planning.machine import Machine, doubled
from jaxis.planning.plan import DEFAULT_CONTEXT_LEN
from jaxis.planning.step_time import work_of
from jaxis.planning.widths import widths

SCHEMA = 1
"""Version of the JSON that `jaxis plan --on this` prints."""

BATCH_SIZES = (1, 4, 16)
PROMPT_LENS = (128, 1024, 8192)
DECODE_CONTEXT = 128
KL_MODEL = "Gemma 3 270M"
_KL = {"int8": 0.0020, "int4": 0.165}  # on KL_MODEL, from the table of docs/quantization.md


@dataclass(frozen=True)
class LocalOption:
    """One width of the weights on this machine.

    Attributes:
      quantization: Value for `--quantization`; None leaves weights as stored.
      fits: True if the weights, and a request of the asked-for length, fit into the free memory.
      meets: True if it fits, and is as fast and as small as was asked for.
      memory_bytes: Memory of the process with the weights and the cache of such a request.
      max_context: Tokens of the longest single request; 0 if none fits.
      start_seconds: From the start of the process to the first token of a prompt of 128, with the checkpoint in the
        system's file cache and compiled programs on the disk.
      disk_seconds: Time that is added to the start if the checkpoint must be read from the disk.
      tokens_per_second: Rate of all requests together, by their number, with 128 tokens of context each.
      by_cores: Rate of one such request by the number of cores, as modelled: to four times this machine's.
      first_token_seconds: Time by the tokens of a prompt; None for one that is longer than the model's context.
      kl: Mean KL from the stored weights as measured on KL_MODEL; None if none was measured.
    """

    quantization: str | None
    weights: str
    fits: bool
    meets: bool
    weight_bytes: int
    memory_bytes: int
    max_context: int
    start_seconds: float
    disk_seconds: float
    tokens_per_second: dict[int, float]
    by_cores: dict[int, float]
    first_token_seconds: dict[int, float | None]
    kl: float | None


@dataclass(frozen=True)
class LocalPlan:
    """A plan for this machine; options go from the widest weights to the lowest precision.

    Attributes:
      chosen: Index of the first option that meets all that was asked for; None if none does.
      free_bytes: Free memory, of which a server may take 90%.
    """

    model: str
    architectures: tuple[str, ...]
    context_len: int
    free_bytes: int
    machine: Machine
    options: tuple[LocalOption, ...]
    chosen: int | None


@dataclass(frozen=True)
class LocalWanted:
    """Requirements: a context, the only quantization to consider, tokens/s of one request, and most memory."""

    context_len: int | None = None
    quantization: str | None = None
    tokens_per_second: float = 0.0
    memory_bytes: int | None = None


def plan_here(source: ModelSource, machine: Machine, free_bytes: int, wanted: LocalWanted) -> LocalPlan:
    """Plans a model for a measured machine with so much free memory. Raises ConfigError if jaxis cannot run it."""
    found = widths(source, wanted.quantization)
    longest = found[0].vllm_config.model_config.max_model_len
    context_len = wanted.context_len or min(DEFAULT_CONTEXT_LEN, longest)
    if context_len > longest:
        raise ConfigError(f"--max-model-len {context_len} is more than the model's {longest} tokens: give less")
    stored = [info.nbytes for info in (source.tensors or {}).values()]
    options = tuple(
        _option(width, machine, usable_bytes(free_bytes), context_len, sum(stored), wanted) for width in found
    )
    chosen = next((index for index, option in enumerate(options) if option.meets), None)
    architectures = tuple(source.config.get("architectures") or ())
    return LocalPlan(source.name, architectures, context_len, free_bytes, machine, options, chosen)


def _option(
    width: Width, machine: Machine, limit: int, context_len: int, file_bytes: int, wanted: LocalWanted
) -> LocalOption:
    work = work_of(width)
    account = MemoryAccount(width.vllm_config, [work.part.place()])
    process_bytes = work.process_bytes(machine)
    longest = account.longest_context(limit - process_bytes)
    memory_bytes = process_bytes + account.held_bytes + account.needed_bytes(context_len)
    rates = {number: number / work.decode_seconds(machine, number, DECODE_CONTEXT) for number in BATCH_SIZES}
    most = machine.limits[-1].num_threads or 1
    cores = sorted({*doubled(most), *((most, 2 * most, 4 * most) if most > 1 else ())})  # one says nothing of more
    fits = longest >= context_len
    is_small = wanted.memory_bytes is None or memory_bytes <= wanted.memory_bytes
    limit_len = width.vllm_config.model_config.max_model_len
    is_stored_float = width.quantization is None and width.vllm_config.quant_config is None
    return LocalOption(
        quantization=width.quantization,
        weights=width.name,
        fits=fits,
        meets=fits and is_small and rates[1] >= wanted.tokens_per_second,
        weight_bytes=account.held_bytes,
        memory_bytes=memory_bytes,
        max_context=longest,
        start_seconds=work.start_seconds(machine, PROMPT_LENS[0]),
        disk_seconds=(file_bytes or account.held_bytes) / machine.disk_bytes_per_second,
        tokens_per_second=rates,
        by_cores={each: 1 / work.decode_seconds(machine.with_cores(each), 1, DECODE_CONTEXT) for each in cores},
        first_token_seconds={n: work.prefill_seconds(machine, n) if n <= limit_len else None for n in PROMPT_LENS},
        kl=0.0 if is_stored_float else _KL.get(width.quantization or ""),
    )


def local_plan_text(plan: LocalPlan) -> str:
    """Formats a plan in at most 80 columns."""
    header = ("  weights", "memory", "context", "start", *(f"{n}: tok/s" for n in BATCH_SIZES))
    header += (*(f"{n}" for n in PROMPT_LENS), "KL")
    rows = [
        (
            f"{'>' if index == plan.chosen else ' '} {option.weights}",
            human_bytes(option.memory_bytes),
            str(option.max_context or "none"),
            f"{option.start_seconds:.1f} s",
            *(format_number(rate) for rate in option.tokens_per_second.values()),
            *("-" if s is None else f"{format_number(s)} s" for s in option.first_token_seconds.values()),
            "-" if option.kl is None else f"{option.kl:.4f}",
        )
        for index, option in enumerate(plan.options)
    ]
    machine, limits = plan.machine, plan.machine.limits[-1]
    shown = plan.options[plan.chosen or 0]
    cores = ", ".join(f"{number}: {format_number(rate)}" for number, rate in shown.by_cores.items())
    lines = [
        f"{plan.model}  {' '.join(plan.architectures)}",
        f"{machine.facts['cpu']}, {machine.facts['cores']} cores, {human_bytes(plan.free_bytes)} free",
        f"reads {limits.memory_bytes_per_second / 1e9:.1f} GB/s, {limits.flops_per_second / 1e9:.0f} GFLOP/s, disk "
        f"{machine.disk_bytes_per_second / 1e9:.1f} GB/s, {1e6 * limits.barrier_seconds:.1f} us a barrier",
        _verdict(plan),
        "",
        format_table(header, rows),
        "",
        f"cores, modelled: {cores} tok/s of one request, {shown.weights}",
        f"memory: with a request of {plan.context_len} tokens; tok/s: 1, 4, 16 requests of {DECODE_CONTEXT} tokens;",
        f"128, 1024, 8192: first token of such a prompt; KL: on {KL_MODEL}, others differ",
    ]
    return "\n".join(lines)


def _verdict(plan: LocalPlan) -> str:
    if plan.chosen is not None:
        chosen = plan.options[plan.chosen]
        flag = f" --quantization {chosen.quantization}" if chosen.quantization in LOW_PRECISION else ""
        return f"fits: jaxis serve {plan.model}{flag} --max-model-len {plan.context_len}"
    if any(option.fits for option in plan.options):
        return "no weights are as fast and as small as asked for"
    least = min(option.memory_bytes for option in plan.options)
    return (
        f"does not fit: needs {human_bytes(least)}, of which {human_bytes(usable_bytes(plan.free_bytes))} may be used"
    )
