"""Turns a comparison's JSON into tables, Markdown and plots, and several into a section of the documentation.

python benchmarks/report.py results/results.json
python benchmarks/report.py results/results.json results-sweeps/results.json --docs docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from engines import engine_of
from jaxis.bench.text import format_bytes, format_number, format_share, format_table
from loads import TABLE
from plots import write_plots
from summary import (
    Figures,
    FiguresByLoad,
    LoadKey,
    Spread,
    Start,
    opponents,
    ratio,
    spread,
    summarize,
    summarize_starts,
)

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, header, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of compare.py; several for --docs")
    parser.add_argument("--docs", type=Path, help="page whose section of figures is to be replaced")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.results]
    for path, of_path in zip(arguments.results, results, strict=True):
        print(write_report(of_path, path.parent))
    if arguments.docs is not None:
        write_docs(results, arguments.docs)


def write_report(results: dict[str, Any], folder: Path) -> str:
    """Writes results.md and the plots to a folder; returns the same as text for a terminal."""
    plots = write_plots(summarize(results), folder)
    (folder / "results.md").write_text(markdown(results, [path.name for path in plots]))
    parts = [f"{title}\n{format_table(header, rows)}" for title, header, rows in tables(results)]
    return "\n\n".join([*describe(results), *parts])


def write_docs(results: list[dict[str, Any]], page: Path) -> None:
    """Replaces what stands between a page's marks; plots go to the folder `figures` beside the page.

    Args:
      results: Of runs with different models or loads; of a sweep that several have, the last one's plot is kept.
      page: Has a line BEGIN and a line END.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"report: {page} has no {BEGIN} ... {END}: add both lines")
    parts = []
    for run in results:
        plots = write_plots(summarize(run), page.parent / "figures")
        parts.append(markdown(run, [path.relative_to(page.parent).as_posix() for path in plots]))
    page.write_text(f"{before}{BEGIN}\n{chr(10).join(parts)}{END}{after}")


def markdown(results: dict[str, Any], plots: list[str]) -> str:
    """The report as Markdown, with headings of the third level."""
    lines = [f"{line}  " for line in describe(results)]
    for title, header, rows in tables(results):
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
    rounds = results["rounds"]
    names = [f"jaxis {machine['jaxis']}", f"jax {machine['jax']}"]
    names += [f"{name} {version}" for name, version in results["versions"].items()]
    lines = [
        f"Model: {results['model']}. Machine: {machine['cpu']}, {results['threads']} threads, {machine['platform']}, "
        f"native kernels {machine['native_kernels']}. Measured on {results['date']}: "
        + ("one round." if rounds == 1 else f"{rounds} rounds, medians (least to greatest)."),
        f"Versions: {', '.join(names)}.",
        f"Limits: reads {median['read_bytes_per_second']:.1f} GB/s ({min(reads):.1f} to {max(reads):.1f}), "
        f"copies {median['copy_bytes_per_second']:.1f} GB/s, {median['flops_per_second']:.0f} GFLOP/s in float32.",
    ]
    failed: dict[tuple[str, str], list[str]] = {}
    for what, reason in results["failures"].items():
        engine, _, load = what.partition(", ")
        failed.setdefault((engine, reason), []).append(load)
    return lines + [f"Failed: {engine} ({'; '.join(loads)}): {reason}." for (engine, reason), loads in failed.items()]


def tables(results: dict[str, Any]) -> list[Table]:
    """All the tables: of each load the speeds, then ratios against peers, starts and memory, and the sweeps."""
    figures = summarize(results)
    main = {load: by_engine for load, by_engine in figures.items() if load.group == TABLE}
    result = [_speeds(load, by_engine) for load, by_engine in main.items()]
    if main:
        result += [table for table in (_ratios(main, name) for name in ("decode", "prefill")) if table[2]]
    result += [
        _starts(model, by_engine) for (group, model), by_engine in summarize_starts(results).items() if group == TABLE
    ]
    for group in dict.fromkeys(load.group for load in figures if load.group != TABLE):
        swept = {load: by_engine for load, by_engine in figures.items() if load.group == group}
        result += [_sweep(group, swept, name) for name in ("decode", "prefill")]
    return result


def _speeds(load: LoadKey, by_engine: dict[str, Figures]) -> Table:
    rows = [
        (
            engine,
            _with_spread(spread(f.decode_tokens_per_second.values())),
            format_share(f.decode_share_of_limit),
            _with_spread(spread(f.prefill_tokens_per_second.values())),
            format_share(f.prefill_share_of_limit),
        )
        for engine, f in by_engine.items()
    ]
    header = ("engine", "decode tok/s", "of limit", "prefill tok/s", "of limit")
    return f"{load.model}: {load.batch_size} x {load.input_len} tokens", header, rows


def _ratios(figures: FiguresByLoad, name: str) -> Table:
    """Against each peer with the same weights, or weights of the same width; `name` is decode or prefill."""
    engines = list(dict.fromkeys(engine for by_engine in figures.values() for engine in by_engine))
    rows = []
    for engine in engines:
        for peer in opponents(engine, engines) if engine_of(engine).library == "jaxis" else ():
            cells = [_ratio_cell(by_engine, engine, peer, name) for by_engine in figures.values()]
            rows.append((engine, peer, *cells))
    loads = tuple(f"{load.batch_size} x {load.input_len}" for load in figures)
    model = next(iter(figures)).model
    return f"{model}: {name}, times the speed of the peer", ("engine", "peer", *loads), rows


def _ratio_cell(by_engine: dict[str, Figures], engine: str, peer: str, name: str) -> str:
    if engine not in by_engine or peer not in by_engine:
        return "-"
    ours, theirs = (getattr(by_engine[key], f"{name}_tokens_per_second") for key in (engine, peer))
    compared = ratio(ours, theirs)
    if compared is None:
        return "-"
    median, low, high = (f"{value:.2f}" for value in compared)
    return f"{median}x" if len(ours) == 1 else f"{median}x ({low} to {high})"


def _starts(model: str, by_engine: dict[str, Start]) -> Table:
    rows = [
        (
            engine,
            f"{_with_spread(spread(start.seconds.values()))} s",
            "-" if start.cold_seconds is None else f"{start.cold_seconds:.1f} s",
            format_bytes(start.start_peak_memory_bytes),
            format_bytes(start.peak_memory_bytes),
            format_bytes(start.weight_bytes),
        )
        for engine, start in by_engine.items()
    ]
    header = ("engine", "start to first token", "cold", "peak memory at start", "peak memory", "weights")
    return f"{model}: start and memory", header, rows


def _sweep(group: str, figures: FiguresByLoad, name: str) -> Table:
    engines = dict.fromkeys(engine for by_engine in figures.values() for engine in by_engine)
    rows = [
        (engine, *(_sweep_cell(by_engine.get(engine), f"{name}_tokens_per_second") for by_engine in figures.values()))
        for engine in engines
    ]
    labels = tuple(load.model if group == "size" else f"{load.batch_size} x {load.input_len}" for load in figures)
    return f"Sweep over {group}: {name}, tokens/s", ("engine", *labels), rows


def _sweep_cell(figures: Figures | None, name: str) -> str:
    return "-" if figures is None else _with_spread(spread(getattr(figures, name).values()))


def _with_spread(value: Spread) -> str:
    """The median, and in brackets the spread if there is one."""
    median, low, high = map(format_number, value)
    return median if value.low == value.high else f"{median} ({low} to {high})"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
