"""Plots of a comparison's sweeps: cost against context, batch size and model size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from summary import Figures, LoadKey

SHORT_INPUT_LEN = 128


@dataclass(frozen=True)
class Sweep:
    """One plot.

    Attributes:
      name: Of its file.
      title, x_label, y_label: What it says.
      x: The place of a load on the axis, or None if the load is not part of the sweep.
      y: The height of an engine's figures.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    x: Callable[[LoadKey], float | None]
    y: Callable[[Figures], float]


def sweeps(figures: dict[LoadKey, dict[str, Figures]]) -> list[Sweep]:
    """The plots that these figures have at least two points for."""
    first_model = next(iter(figures))[0]
    models = list(dict.fromkeys(model for model, _, _ in figures))
    known = [
        Sweep(
            "context",
            "Decoding one request: cost against context",
            "context, tokens",
            "step, ms",
            lambda load: load[2] if load[:2] == (first_model, 1) and load[2] > SHORT_INPUT_LEN else None,
            lambda figure: 1000 * figure.step_seconds,
        ),
        Sweep(
            "batch",
            f"Decoding at {SHORT_INPUT_LEN} tokens of context: speed against batch size",
            "requests",
            "tokens/s, all requests",
            lambda load: load[1] if (load[0], load[2]) == (first_model, SHORT_INPUT_LEN) else None,
            lambda figure: figure.decode_tokens_per_second,
        ),
        Sweep(
            "size",
            "Decoding one request: cost against model size",
            "parameters, billions",
            "step, ms",
            lambda load: _billions(load[0]) if load[1:] == (1, SHORT_INPUT_LEN) and len(models) > 1 else None,
            lambda figure: 1000 * figure.step_seconds,
        ),
    ]
    return [sweep for sweep in known if len([load for load in figures if sweep.x(load) is not None]) > 1]


def write_plots(figures: dict[LoadKey, dict[str, Figures]], folder: Path) -> list[Path]:
    """Writes a PNG for each sweep that was measured; returns their paths."""
    wanted = sweeps(figures) if figures else []
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
            axes.plot(*zip(*points, strict=True), marker="o", label=engine, ls="-" if engine[:5] == "jaxis" else "--")
        axes.set(title=sweep.title, xlabel=sweep.x_label, ylabel=sweep.y_label, xscale="log", yscale="log")
        ticks = sorted({x for load in figures if (x := sweep.x(load)) is not None})
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


def series(sweep: Sweep, figures: dict[LoadKey, dict[str, Figures]]) -> dict[str, list[tuple[float, float]]]:
    """Each engine's points, from left to right."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for load, by_engine in figures.items():
        x = sweep.x(load)
        for engine, figure in by_engine.items() if x is not None else ():
            lines.setdefault(engine, []).append((x, sweep.y(figure)))
    return {engine: sorted(points) for engine, points in lines.items()}


def _billions(model: str) -> float:
    """From a name such as qwen3-0.6b."""
    return float(model.rpartition("-")[2].removesuffix("b"))
