"""Plots of a comparison's sweeps: cost against context, batch size and model size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from summary import Figures, FiguresByLoad, LoadKey, Spread, spread


@dataclass(frozen=True)
class Sweep:
    """One plot.

    Attributes:
      name: Of the sweep, and of the plot's file.
      title, x_label, y_label: What it says.
      x: The place of a load on the axis.
      y: The height of an engine's figures, by round.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    x: Callable[[LoadKey], float]
    y: Callable[[Figures], dict[int, float]]


KNOWN = (
    Sweep(
        "context",
        "Decoding one request: cost against context",
        "context, tokens",
        "step, ms",
        lambda load: load.input_len,
        lambda figures: {number: 1000 * seconds for number, seconds in figures.step_seconds.items()},
    ),
    Sweep(
        "batch",
        "Decoding at 128 tokens of context: speed against batch size",
        "requests",
        "tokens/s, all requests",
        lambda load: load.batch_size,
        lambda figures: figures.decode_tokens_per_second,
    ),
    Sweep(
        "size",
        "Decoding one request: cost against model size",
        "parameters, billions",
        "step, ms",
        lambda load: _billions(load.model),
        lambda figures: {number: 1000 * seconds for number, seconds in figures.step_seconds.items()},
    ),
)


def sweeps(figures: FiguresByLoad) -> list[Sweep]:
    """The plots that these figures have at least two points for."""
    groups = [load.group for load in figures]
    return [sweep for sweep in KNOWN if groups.count(sweep.name) > 1]


def write_plots(figures: FiguresByLoad, folder: Path) -> list[Path]:
    """Writes a PNG for each sweep that was measured; returns their paths."""
    wanted = sweeps(figures)
    if not wanted:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for sweep in wanted:
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for engine, points in series(sweep, figures).items():
            x, y = zip(*points, strict=True)
            bars = [[at.median - at.low for at in y], [at.high - at.median for at in y]]
            line = "-" if engine.startswith("jaxis") else "--"
            axes.errorbar(x, [at.median for at in y], bars, marker="o", capsize=3, label=engine, ls=line)
        axes.set(title=sweep.title, xlabel=sweep.x_label, ylabel=sweep.y_label, xscale="log", yscale="log")
        ticks = sorted({sweep.x(load) for load in figures if load.group == sweep.name})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.xaxis.minorticks_off()
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        paths.append(folder / f"{sweep.name}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def series(sweep: Sweep, figures: FiguresByLoad) -> dict[str, list[tuple[float, Spread]]]:
    """Each engine's points, from left to right."""
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for load, by_engine in figures.items():
        for engine, of_engine in by_engine.items() if load.group == sweep.name else ():
            lines.setdefault(engine, []).append((sweep.x(load), spread(sweep.y(of_engine).values())))
    return {engine: sorted(points) for engine, points in lines.items()}


def _billions(model: str) -> float:
    """From a name such as qwen3-0.6b."""
    return float(model.rpartition("-")[2].removesuffix("b"))
