"""Figures of a benchmark as planned, to stand beside the measured ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.bench.run import Load
from jaxis.bringup.analyze.source import open_source
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.memory_account import MemoryAccount
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.planning.machine import kept_machine
from jaxis.planning.step_time import work_of
from jaxis.planning.widths import widths

# Others change what an engine computes in ways that no machine was measured for.
_KNOWN = {"quantization", "speculative_config", "kv_cache_memory", "max_num_seqs", "max_model_len"}


def planned_bench(model: str | None, arguments: Mapping[str, Any], loads: Sequence[Load]) -> dict[str, Any] | None:
    """Returns what is planned for an engine with these arguments of `LLM`; None without a measured machine."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    changed = {name for name, value in arguments.items() if value != defaults[name]}
    if changed - _KNOWN or (machine := kept_machine()) is None:
        return None
    source = open_source(EMBEDDED_MODEL if model is None else model)
    width = widths(source, arguments.get("quantization") or "none")[0]
    work = work_of(width)
    planned = []
    for load in loads:
        step = work.decode_seconds(machine, load.batch_size, load.input_len + load.output_len // 2)
        seconds = load.batch_size * work.prefill_seconds(machine, load.input_len)
        planned.append({"prefill_seconds": seconds, "decode_tokens_per_second": load.batch_size / step})
    prompt = loads[0].input_len  # whose first token ends the start
    account = MemoryAccount(width.vllm_config, [work.part.place()])
    start_bytes = work.process_bytes(machine) + account.held_bytes + account.needed_bytes(prompt)
    return {"start_seconds": work.start_seconds(machine, prompt), "start_bytes": start_bytes, "loads": planned}
