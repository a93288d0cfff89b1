"""The figures of a comparison: medians over its rounds with their spread, shares of the limit, ratios against peers."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engines import BASELINE, engine_of
from jaxis.bench.cost import DecodeCost, PrefillCost


class Spread(NamedTuple):
    """One figure over the rounds: the median, the least and the greatest."""

    median: float
    low: float
    high: float


class LoadKey(NamedTuple):
    """Which load of which model, and of which group: `loads.TABLE` or a sweep."""

    group: str
    model: str
    batch_size: int
    input_len: int


@dataclass(frozen=True)
class Figures:
    """One engine on one load of one model.

    Attributes:
      prefill_tokens_per_second, decode_tokens_per_second: Of all requests together, by round.
      step_seconds: Of a decode step, by round.
      prefill_share_of_limit, decode_share_of_limit: Of the arithmetic's and the memory's measured speed, medians; the
        decode's bytes are this engine's own weights and cache.
    """

    prefill_tokens_per_second: dict[int, float]
    decode_tokens_per_second: dict[int, float]
    step_seconds: dict[int, float]
    prefill_share_of_limit: float
    decode_share_of_limit: float


@dataclass(frozen=True)
class Start:
    """The processes of one engine that ran one group of loads of one model.

    Attributes:
      seconds: From the process's start to the first token, by round.
      cold_seconds: The same without compiled programs on disk, where that was measured.
      start_peak_memory_bytes, peak_memory_bytes: Up to the first token, and in all, medians.
      weight_bytes: Of the weights as they are in memory.
    """

    seconds: dict[int, float]
    cold_seconds: float | None
    start_peak_memory_bytes: float
    peak_memory_bytes: float
    weight_bytes: int


FiguresByLoad = dict[LoadKey, dict[str, Figures]]
DECODE_COST = [field.name for field in dataclasses.fields(DecodeCost)]


def spread(values: Iterable[float]) -> Spread:
    """The spread of a figure's rounds."""
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values))


def summarize(results: dict[str, Any]) -> FiguresByLoad:
    """The figures by load and then by engine, in the order in which they were measured.

    Args:
      results: What `compare.py` wrote.
    """
    limits = {
        name: statistics.median(limit[name] for limit in results["limits"])
        for name in ("read_bytes_per_second", "flops_per_second")
    }
    costs = {_process(start): _decode_cost(start) for start in results["starts"]}
    rows: dict[LoadKey, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in results["rows"]:
        rows[LoadKey(row["group"], row["model"], row["batch_size"], row["input_len"])][row["engine"]].append(row)
    return {
        load: {
            engine: _figures(
                by_engine[engine],
                costs[load.group, load.model, engine],
                PrefillCost(**results["prefill_costs"][load.model]),
                limits,
            )
            for engine in results["engines"]
            if engine in by_engine
        }
        for load, by_engine in rows.items()
    }


def summarize_starts(results: dict[str, Any]) -> dict[tuple[str, str], dict[str, Start]]:
    """The starts, by group and model and then by engine, in the order of the engines.

    Args:
      results: What `compare.py` wrote.
    """
    starts: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for start in results["starts"]:
        group, model, engine = _process(start)
        starts[group, model][engine].append(start)
    return {
        key: {engine: _start(by_engine[engine]) for engine in results["engines"] if engine in by_engine}
        for key, by_engine in starts.items()
    }


def _process(start: dict[str, Any]) -> tuple[str, str, str]:
    return start["group"], start["model"], start["engine"]


def _decode_cost(start: dict[str, Any]) -> DecodeCost:
    return DecodeCost(**{name: start[name] for name in DECODE_COST if name in start})


def _figures(rows: list[dict[str, Any]], decode: DecodeCost, prefill: PrefillCost, limits: dict[str, float]) -> Figures:
    batch_size, input_len = rows[0]["batch_size"], rows[0]["input_len"]
    step_seconds = {row["round"]: row["step_seconds"] for row in rows}
    prefill_seconds = {row["round"]: row["prefill_seconds"] for row in rows}
    num_bytes = decode.step_bytes(batch_size, statistics.median(row["context_len"] for row in rows))
    num_flops = prefill.flops(batch_size, input_len)
    return Figures(
        prefill_tokens_per_second={n: batch_size * input_len / seconds for n, seconds in prefill_seconds.items()},
        decode_tokens_per_second={n: batch_size / seconds for n, seconds in step_seconds.items()},
        step_seconds=step_seconds,
        prefill_share_of_limit=num_flops / limits["flops_per_second"] / statistics.median(prefill_seconds.values()),
        decode_share_of_limit=num_bytes / limits["read_bytes_per_second"] / statistics.median(step_seconds.values()),
    )


def _start(starts: list[dict[str, Any]]) -> Start:
    cost = _decode_cost(starts[0])
    return Start(
        seconds={start["round"]: start["start_seconds"] for start in starts},
        cold_seconds=next((start["cold_start_seconds"] for start in starts if "cold_start_seconds" in start), None),
        start_peak_memory_bytes=statistics.median(start["start_peak_memory_bytes"] for start in starts),
        peak_memory_bytes=statistics.median(start["peak_memory_bytes"] for start in starts),
        weight_bytes=cost.held_bytes(0),
    )


def opponents(engine: str, engines: Iterable[str]) -> list[str]:
    """The peers that an engine of jaxis is compared with.

    Of each library, those with the same weights, otherwise those with weights of the same width; of another checkout,
    the same engine.

    Args:
      engine: Its name.
      engines: The names of all that were measured.
    """
    own = engine_of(engine)
    result: list[str] = []
    by_library: dict[str, list[str]] = defaultdict(list)
    for name in engines:
        if (peer := engine_of(name)).library != "jaxis" and peer.width == own.width:
            by_library[peer.library].append(name)
    for library, names in by_library.items():
        if library == BASELINE:
            result += [name for name in names if name == f"{BASELINE}:{engine}"]
        else:
            result += [name for name in names if engine_of(name).weights == own.weights] or names
    return result


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> Spread | None:
    """How many times the others' figure ours is, each round for itself; None without a round that has both.

    Args:
      ours: Figures of which more is better, by round.
      theirs: The same figures of the others.
    """
    ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
    return spread(ratios) if ratios else None
