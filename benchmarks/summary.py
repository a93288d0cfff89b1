"""The figures of a comparison: medians over its rounds, shares of the limit, ratios against peers."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from engines import ENGINES
from jaxis.bench.cost import DecodeCost, PrefillCost


@dataclass(frozen=True)
class Figures:
    """One engine on one load of one model.

    Attributes:
      prefill_tokens_per_second, decode_tokens_per_second: Of all requests together.
      prefill_share_of_limit, decode_share_of_limit: Of the arithmetic's and the memory's measured speed; the decode's
        bytes are this engine's own weights and cache.
      step_seconds: Of a decode step.
      start_seconds: From the process's start to the first token.
      cold_start_seconds: The same without compiled programs on disk, where that was measured.
      start_peak_memory_bytes, peak_memory_bytes: Up to the first token, and in all.
      held_bytes: Weights, and the cache of the load's tokens.
    """

    prefill_tokens_per_second: float
    prefill_share_of_limit: float
    decode_tokens_per_second: float
    decode_share_of_limit: float
    step_seconds: float
    start_seconds: float
    cold_start_seconds: float | None
    start_peak_memory_bytes: float
    peak_memory_bytes: float
    held_bytes: float


DECODE_COST = [field.name for field in dataclasses.fields(DecodeCost)]

LoadKey = tuple[str, int, int]  # model, batch size, input length


def summarize(results: dict[str, Any]) -> dict[LoadKey, dict[str, Figures]]:
    """Medians over the rounds, by load and then by engine, in the order in which they were measured.

    Args:
      results: What `compare.py` wrote.
    """
    limits = {
        name: statistics.median(limit[name] for limit in results["limits"])
        for name in ("read_bytes_per_second", "flops_per_second")
    }
    rows: dict[tuple[LoadKey, str], list[dict[str, Any]]] = defaultdict(list)
    for row in results["rows"]:
        rows[(row["model"], row["batch_size"], row["input_len"]), row["engine"]].append(row)
    figures: dict[LoadKey, dict[str, Figures]] = defaultdict(dict)
    for (load, engine), group in rows.items():
        cost = PrefillCost(**results["prefill_costs"][load[0]])
        figures[load][engine] = _figures(group, cost, limits)
    return dict(figures)


def _figures(rows: list[dict[str, Any]], prefill: PrefillCost, limits: dict[str, float]) -> Figures:
    median = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, int | float) and all(name in row for row in rows)
    }
    batch_size, input_len = rows[0]["batch_size"], rows[0]["input_len"]
    decode = DecodeCost(**{name: rows[0][name] for name in DECODE_COST if name in rows[0]})
    num_bytes = decode.step_bytes(batch_size, median["context_len"])
    num_flops = prefill.flops(batch_size, input_len)
    num_tokens = input_len + rows[0]["output_len"]
    return Figures(
        prefill_tokens_per_second=batch_size * input_len / median["prefill_seconds"],
        prefill_share_of_limit=num_flops / limits["flops_per_second"] / median["prefill_seconds"],
        decode_tokens_per_second=batch_size / median["step_seconds"],
        decode_share_of_limit=num_bytes / limits["read_bytes_per_second"] / median["step_seconds"],
        step_seconds=median["step_seconds"],
        start_seconds=median["start_seconds"],
        cold_start_seconds=next((row["cold_start_seconds"] for row in rows if "cold_start_seconds" in row), None),
        start_peak_memory_bytes=median["start_peak_memory_bytes"],
        peak_memory_bytes=median["peak_memory_bytes"],
        held_bytes=decode.held_bytes(batch_size * num_tokens),
    )


def ratio_to_width(figures: dict[str, Figures], engine: str, name: str) -> tuple[float, str] | None:
    """How many times the best peer with weights of the same width the engine's figure is, and which peer that is.

    Args:
      figures: One load's, by engine.
      engine: One of jaxis.
      name: A figure of which more is better.
    """
    width = ENGINES[engine].width
    return _ratio(figures, engine, name, [peer for peer in figures if ENGINES[peer].width == width])


def ratio_to_best(figures: dict[str, Figures], engine: str, name: str) -> tuple[float, str] | None:
    """As `ratio_to_width`, against the best peer of any width."""
    return _ratio(figures, engine, name, list(figures))


def _ratio(figures: dict[str, Figures], engine: str, name: str, candidates: list[str]) -> tuple[float, str] | None:
    peers = [peer for peer in candidates if ENGINES[peer].library != "jaxis"]
    if not peers:
        return None
    best = max(peers, key=lambda peer: getattr(figures[peer], name))
    return getattr(figures[engine], name) / getattr(figures[best], name), best
