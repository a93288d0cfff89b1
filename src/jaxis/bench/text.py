"""Formats benchmark reports as text: the run, a table of figures, and counts of drafts, also under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxis.engine.speculation import DraftCounts

if TYPE_CHECKING:
    from jaxis.engine.engine import LLMEngine


_MAX_POSITIONS = 8


def draft_counts(engine: LLMEngine, *, since: DraftCounts | None = None) -> DraftCounts | None:
    """Copies an engine's counts, or returns the difference from such a copy; None if nothing drafts."""
    counts = engine.speculation.counts
    return None if counts is None else counts.since(since or DraftCounts())


def draft_figures(counts: DraftCounts | None) -> dict[str, Any]:
    """Returns the figures; none if nothing drafts. Shares are percentages, and None if there were no drafts."""
    if counts is None:
        return {}
    drafts, tokens, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / tokens if tokens else None,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else None,
        "spec_decode_per_position_acceptance_rates": [
            number / drafts for number in counts.num_accepted_by_position if drafts
        ],
    }


def format_drafts(report: Mapping[str, Any]) -> str | None:
    """Describes these figures of a report in one line; returns None if it has none."""
    drafts = report.get("spec_decode_num_drafts")
    if drafts is None:
        return None
    if drafts == 0:
        return "none were made"
    positions = report["spec_decode_per_position_acceptance_rates"]
    shares = " ".join(f"{share:.2f}" for share in positions[:_MAX_POSITIONS])
    return (
        f"{drafts} of {report['spec_decode_draft_tokens'] / drafts:.1f} tokens, "
        f"{report['spec_decode_acceptance_rate']:.0f}% of them right; "
        f"mean acceptance length {report['spec_decode_acceptance_length']:.2f}; "
        f"right up to position 1, 2, ...: {shares}{' ...' if len(positions) > _MAX_POSITIONS else ''}"
    )


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats lines with aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for cells in (header, *rows):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def format_number(value: float | None) -> str:
    """Formats a number with at least three significant digits; "-" for None."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def format_share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def format_bytes(value: float | None) -> str:
    """Formats gigabytes or megabytes in powers of 1000, as bandwidths are given; "-" for None."""
    if value is None:
        return "-"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def format_limits(limits: dict[str, Any]) -> str:
    threads = f"{limits['num_threads']} threads: " if limits["num_threads"] else ""
    read = limits["read_bytes_per_second"]
    reads = f"reads {read / 1e9:.1f} GB/s, " if read else ""
    copies = f"copies {limits['copy_bytes_per_second'] / 1e9:.1f} GB/s (read and written)"
    barrier = f", {1e6 * seconds:.1f} us a barrier" if (seconds := limits.get("barrier_seconds")) else ""
    return f"{threads}{reads}{copies}, {limits['flops_per_second'] / 1e9:.0f} GFLOP/s{barrier}"


def format_latency(report: dict[str, Any]) -> str:
    header = ("batch x input + output", "first token", "prefill", "of limit", "step", "steps/s", "tokens/s")
    header += ("context", "reads a step", "of limit")
    rows = []
    for result in report["results"]:
        step = result["decode_step_seconds"]
        num_bytes = None if step is None else result["decode_weight_bytes"] + result["decode_kv_bytes"]
        rows.append(
            (
                f"{result['batch_size']} x {result['input_len']} + {result['output_len']}",
                f"{format_number(1000 * result['time_to_first_token_seconds'])} ms",
                f"{format_number(result['prefill_tokens_per_second'])} tok/s",
                format_share(result["prefill_share_of_limit"]),
                "-" if step is None else f"{format_number(1000 * step)} ms",
                format_number(result["decode_steps_per_second"]),
                format_number(result["decode_tokens_per_second"]),
                "-" if step is None else f"{result['context_len']:.0f}",
                format_bytes(num_bytes),
                format_share(result["decode_share_of_limit"]),
            )
        )
    drafts = [
        (row[0], line) for row, result in zip(rows, report["results"], strict=True) if (line := format_drafts(result))
    ]
    lines = "".join(f"\ndrafts of {load}: {line}" for load, line in drafts)
    if planned := report.get("planned"):
        lines += f"\n\n{_format_planned(planned, report)}"
    return f"{_format_facts(report)}\n\n{format_table(header, rows)}{lines}"


def _format_planned(planned: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Pairs what was planned with what was measured; the last column is the planned figure over the measured one."""
    start = report["start"]
    pairs = [
        ("start to first token, s", planned["start_seconds"], start["seconds_to_first_token"]),
        ("memory at first token, GB", planned["start_bytes"] / 1e9, start["peak_memory_bytes"] / 1e9),
    ]
    for load, result in zip(planned["loads"], report["results"], strict=True):
        name = f"{result['batch_size']} x {result['input_len']} + {result['output_len']}"
        pairs.append((f"{name}: prefill, s", load["prefill_seconds"], result["prefill_seconds"]))
        if result["decode_steps_per_second"] is not None:
            rate = result["batch_size"] * result["decode_steps_per_second"]
            pairs.append((f"{name}: tok/s, no drafts", load["decode_tokens_per_second"], rate))
    rows = [(name, format_number(a), format_number(b), f"{a / b:.2f}x") for name, a, b in pairs]
    return format_table(("", "planned", "measured", ""), rows)


def format_throughput(report: dict[str, Any]) -> str:
    [result] = report["results"]
    token = result["token_seconds_median"], result["token_seconds_p99"]
    rows = [
        ("requests", f"{result['num_requests']} in {format_number(result['elapsed_seconds'])} s"),
        ("requests/s", format_number(result["requests_per_second"])),
        ("input tokens/s", format_number(result["input_tokens_per_second"])),
        ("output tokens/s", format_number(result["output_tokens_per_second"])),
        ("first token", _median_and_p99(result["first_token_seconds_median"], result["first_token_seconds_p99"])),
        ("time per output token", _median_and_p99(*token)),
        ("preemptions", str(result["num_preemptions"])),
    ]
    if line := format_drafts(result):
        rows.append(("drafts", line))
    return f"{_format_facts(report)}\n\n" + "\n".join(f"{name + ':':<24}{text}" for name, text in rows)


def _median_and_p99(median: float | None, p99: float | None) -> str:
    if median is None or p99 is None:
        return "-"
    return f"{format_number(1000 * median)} ms median, {format_number(1000 * p99)} ms 99th percentile"


def _format_facts(report: dict[str, Any]) -> str:
    machine, start = report["machine"], report["start"]
    rows = [
        ("model", f"{report['model']}, {report['dtype']}"),
        ("machine", f"{machine['cpu']}, {machine['cores']} cores, device {machine['device']}"),
        ("limits", format_limits(report["limits"])),
        (
            "start to first token",
            f"{start['seconds_to_first_token']:.2f} s; {start['compile_seconds']:.2f} s compiling, over all threads; "
            f"{start['num_programs']} programs, {start['num_programs_from_disk']} of them from disk",
        ),
        (
            "peak memory",
            f"{format_bytes(start['peak_memory_bytes'])} at the first token, "
            f"{format_bytes(report['peak_memory_bytes'])} in all",
        ),
    ]
    return "\n".join(f"{name + ':':<24}{text}" for name, text in rows)
