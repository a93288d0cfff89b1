"""Computes and formats the figures of a load test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxis.bench.serving.client import RequestResult
from jaxis.bench.serving.load import LoadResult
from jaxis.bench.text import draft_figures, format_drafts, format_number, format_table

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between events",
    "e2el": "end-to-end latency",
}
MILLISECONDS = 1000.0
_BUSY_CLIENT = 0.8  # of one core, all that a single-threaded client can use


def time_to_first_token(result: RequestResult) -> float:
    """Seconds from when the request was due to its first token."""
    return result.token_times[0] - result.scheduled_time


def time_per_output_token(result: RequestResult) -> float | None:
    """Mean seconds per token after the first; None if the answer has one token, arrived at once, or was not counted."""
    num_later = (result.num_output_tokens or 0) - 1
    if num_later < 1 or len(result.token_times) < 2:
        return None
    return (result.token_times[-1] - result.token_times[0]) / num_later


def end_to_end_latency(result: RequestResult) -> float:
    """Seconds from when the request was due to its last token."""
    return result.token_times[-1] - result.scheduled_time


def summarize(
    load: LoadResult, percentiles: Sequence[float], goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures, as JSON values under vLLM's names.

    Args:
      load: The measured load.
      percentiles: Percentiles to report for each latency, 0 to 100.
      goodput: Limits in milliseconds on "ttft", "tpot" and "e2el" within which a request counts as good.
    """
    completed = [result for result in load.results if result.error is None and result.token_times]
    errors = Counter(result.error or "the answer has no token" for result in load.results if result not in completed)
    duration = load.duration_seconds or float("nan")
    num_input, num_output = _total(completed, "num_prompt_tokens"), _total(completed, "num_output_tokens")
    num_events = sum(len(result.token_times) for result in completed)
    report: dict[str, Any] = {
        "duration": load.duration_seconds,
        "completed": len(completed),
        "failed": len(load.results) - len(completed),
        "errors": dict(errors.most_common()),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(completed) / duration,
        "output_throughput": None if num_output is None else num_output / duration,
        "total_token_throughput": (
            None if num_input is None or num_output is None else (num_input + num_output) / duration
        ),
        "tokens_per_event": None if num_output is None or not num_events else num_output / num_events,
        "client_cpu_share": load.cpu_seconds / duration,
        "p99_send_delay_ms": _percentile([r.sent_time - r.scheduled_time for r in load.results], 99),
    }
    for name, values in _latencies(completed).items():
        report |= _statistics(name, values, percentiles)
    report |= draft_figures(load.drafts)
    if goodput:
        num_good = sum(_is_good(result, goodput) for result in completed)
        report["request_goodput"] = num_good / duration
    return report


def details(load: LoadResult) -> dict[str, list[Any]]:
    """The results of each request, in the order of sending; times in seconds."""
    results = load.results
    return {
        "input_lens": [result.num_prompt_tokens for result in results],
        "output_lens": [result.num_output_tokens for result in results],
        "ttfts": [time_to_first_token(result) if result.token_times else None for result in results],
        "itls": [np.diff(result.token_times).tolist() for result in results],
        "generated_texts": [result.text for result in results],
        "request_errors": [result.error for result in results],
    }


def format_report(report: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The report of `jaxis bench serve`."""
    limit = f", at most {report['max_concurrency']} at once" if report["max_concurrency"] else ""
    rate = report["request_rate"]
    pace = "all due at once" if rate == "inf" else f"{rate:g} a second, burstiness {report['burstiness']:g}"
    per_event = report["tokens_per_event"]
    busy = " (it may be the limit)" if report["client_cpu_share"] > _BUSY_CLIENT else ""
    facts = [
        ("server", f"{report['url']}, model {report['model_id']}"),
        ("load", f"{report['num_prompts']} requests, {pace}{limit}"),
        ("completed", f"{report['completed']} in {format_number(report['duration'])} s, {report['failed']} failed"),
        ("tokens", f"{_count(report['total_input_tokens'])} in, {_count(report['total_output_tokens'])} out"),
        ("requests/s", format_number(report["request_throughput"])),
        ("output tokens/s", format_number(report["output_throughput"])),
        ("all tokens/s", format_number(report["total_token_throughput"])),
    ]
    if "request_goodput" in report:
        facts.append(("good requests/s", format_number(report["request_goodput"])))
    if per_event is not None and per_event > 1.05:
        facts.append(("tokens per event", format_number(per_event)))
    if line := format_drafts(report):
        facts.append(("drafts", line))
    facts.append(
        (
            "this client",
            f"{100 * report['client_cpu_share']:.0f}% of a core{busy}, requests up to "
            f"{format_number(report['p99_send_delay_ms'])} ms late (99th percentile)",
        )
    )
    lines = [f"{name + ':':<20}{text}" for name, text in facts]
    lines += [f"{'failed:':<20}{count} x {error}" for error, count in report["errors"].items()]
    header = ("milliseconds", "mean", "median", "std", *(f"p{value:g}" for value in percentiles))
    keys = ("mean", "median", "std", *(f"p{value:g}" for value in percentiles))
    rows = [
        (f"{METRICS[name]} ({name.upper()})", *(format_number(report[f"{key}_{name}_ms"]) for key in keys))
        for name in metrics
    ]
    return "\n".join([*lines, "", format_table(header, rows)])


def _latencies(completed: Sequence[RequestResult]) -> dict[str, list[float]]:
    per_token = [time_per_output_token(result) for result in completed]
    return {
        "ttft": [time_to_first_token(result) for result in completed],
        "tpot": [value for value in per_token if value is not None],
        "itl": [float(gap) for result in completed for gap in np.diff(result.token_times)],
        "e2el": [end_to_end_latency(result) for result in completed],
    }


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    functions: dict[str, Callable[[Sequence[float]], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    figures = {
        f"{key}_{name}_ms": MILLISECONDS * float(function(seconds)) if seconds else None
        for key, function in functions.items()
    }
    return figures | {f"p{value:g}_{name}_ms": _percentile(seconds, value) for value in percentiles}


def _percentile(seconds: Sequence[float], percentile: float) -> float | None:
    return MILLISECONDS * float(np.percentile(seconds, percentile)) if seconds else None


def _is_good(result: RequestResult, goodput: Mapping[str, float]) -> bool:
    values = {
        "ttft": time_to_first_token(result),
        "tpot": time_per_output_token(result) or 0.0,
        "e2el": end_to_end_latency(result),
    }
    return all(MILLISECONDS * values[name] <= limit for name, limit in goodput.items())


def _total(results: Sequence[RequestResult], name: str) -> int | None:
    """The sum of the server's counts; None if one is missing."""
    counts = [getattr(result, name) for result in results]
    return None if None in counts else sum(counts)


def _count(number: int | None) -> str:
    return "not counted by the server" if number is None else str(number)
