"""Turns a comparison's JSON into tables, Markdown and plots, and into a section of the documentation.

python benchmarks/report.py results/results.json
python benchmarks/report.py results/results.json --docs docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from engines import ENGINES
from jaxis.bench.text import format_bytes, format_number, format_share, format_table
from plots import write_plots
from summary import Figures, LoadKey, ratio_to_best, ratio_to_width, summarize

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, header, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of compare.py")
    parser.add_argument("--docs", type=Path, help="page whose section of figures is to be replaced")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    print(write_report(results, arguments.results.parent))
    if arguments.docs is not None:
        write_docs(results, arguments.docs)


def write_report(results: dict[str, Any], folder: Path) -> str:
    """Writes results.md and the plots to a folder; returns the same as text for a terminal."""
    figures = summarize(results)
    plots = write_plots(figures, folder)
    (folder / "results.md").write_text(markdown(results, figures, [path.name for path in plots]))
    parts = [f"{title}\n{format_table(header, rows)}" for title, header, rows in tables(figures)]
    return "\n\n".join([*describe(results), *parts])


def write_docs(results: dict[str, Any], page: Path) -> None:
    """Replaces what stands between a page's marks; plots go to the folder `figures` beside the page."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"report: {page} has no {BEGIN} ... {END}: add both lines")
    figures = summarize(results)
    plots = write_plots(figures, page.parent / "figures")
    names = [path.relative_to(page.parent).as_posix() for path in plots]
    page.write_text(f"{before}{BEGIN}\n{markdown(results, figures, names)}{END}{after}")


def markdown(results: dict[str, Any], figures: dict[LoadKey, dict[str, Figures]], plots: list[str]) -> str:
    """The report as Markdown, with headings of the third level."""
    lines = [f"{line}  " for line in describe(results)]
    for title, header, rows in tables(figures):
        lines += ["", f"### {title}", "", _row(header), _row(["---"] + ["---:"] * (len(header) - 1))]
        lines += [_row(cells) for cells in rows]
    for plot in plots:
        lines += ["", f"![{Path(plot).stem}]({plot})"]
    return "\n".join(lines) + "\n"


def describe(results: dict[str, Any]) -> list[str]:
    """What was measured where, and what failed."""
    machine = results["machine"]
    median = {
        name: statistics.median(limit[name] for limit in results["limits"]) / 1e9
        for name in ("read_bytes_per_second", "copy_bytes_per_second", "flops_per_second")
    }
    reads = [limit["read_bytes_per_second"] / 1e9 for limit in results["limits"]]
    lines = [
        f"Model: {results['model']}. Machine: {machine['cpu']}, threads: {results['threads']}, {machine['platform']}; "
        f"jaxis {machine['jaxis']}, jax {machine['jax']}. "
        + ("One round." if results["rounds"] == 1 else f"Medians over {results['rounds']} rounds."),
        f"Limits: reads {median['read_bytes_per_second']:.1f} GB/s ({min(reads):.1f} to {max(reads):.1f}), "
        f"copies {median['copy_bytes_per_second']:.1f} GB/s, {median['flops_per_second']:.0f} GFLOP/s in float32.",
    ]
    failed: dict[tuple[str, str], list[str]] = {}
    for what, reason in results["failures"].items():
        engine, _, load = what.partition(", ")
        failed.setdefault((engine, reason), []).append(load)
    return lines + [f"Failed: {engine} ({'; '.join(loads)}): {reason}." for (engine, reason), loads in failed.items()]


def tables(figures: dict[LoadKey, dict[str, Figures]]) -> list[Table]:
    """All the tables: speed and ratios of each load, then starts and memory."""
    result: list[Table] = []
    for (model, batch_size, input_len), by_engine in figures.items():
        rows = [
            (
                engine,
                format_number(f.decode_tokens_per_second),
                format_share(f.decode_share_of_limit),
                *_ratios(by_engine, engine, "decode_tokens_per_second"),
                format_number(f.prefill_tokens_per_second),
                format_share(f.prefill_share_of_limit),
                *_ratios(by_engine, engine, "prefill_tokens_per_second"),
            )
            for engine, f in by_engine.items()
        ]
        header = ("engine", "decode tok/s", "of limit", "same width", "best peer")
        header += ("prefill tok/s", "of limit", "same width", "best peer")
        result.append((f"{model}: {batch_size} x {input_len} tokens", header, rows))
    header = ("engine", "start to first token", "cold", "peak memory at start", "peak memory", "weights + KV")
    for (model, batch_size, input_len), by_engine in figures.items():
        rows = [
            (
                engine,
                f"{f.start_seconds:.1f} s",
                "-" if f.cold_start_seconds is None else f"{f.cold_start_seconds:.1f} s",
                format_bytes(f.start_peak_memory_bytes),
                format_bytes(f.peak_memory_bytes),
                format_bytes(f.held_bytes),
            )
            for engine, f in by_engine.items()
        ]
        result.append((f"{model}: start and memory, {batch_size} x {input_len} tokens", header, rows))
    return result


def _ratios(by_engine: dict[str, Figures], engine: str, name: str) -> tuple[str, str]:
    """Against the best peer of the same width, and of any; empty for the peers themselves."""
    if ENGINES[engine].library != "jaxis":
        return "", ""
    ratios = ratio_to_width(by_engine, engine, name), ratio_to_best(by_engine, engine, name)
    width, best = ("-" if ratio is None else f"{ratio[0]:.2f}x {ratio[1]}" for ratio in ratios)
    return width, best


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
