"""The HTML page of a run: its settings, metrics and the model's answers, from the files in its folder alone."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.html_page import render_page
from jaxis.training.config import TrainConfig
from jaxis.training.run_log import ANSWERS_FILE, METRICS_FILE
from jaxis.version import __version__

REPORT_FILE = "report.html"
_MAX_ANSWERS = 30


def write_report(config: TrainConfig, num_rows: int) -> Path:
    """Writes the page into the folder of a run on so many data rows, finished or not, and returns its path.

    Raises ConfigError if matplotlib is missing, and CheckpointError if metrics.jsonl is missing or damaged, or the page
    cannot be written.
    """
    output = Path(config.training.output_dir)
    lines = _read(output / METRICS_FILE)
    answers = _read(output / ANSWERS_FILE) if config.training.metrics_function is not None else []
    steps = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "eval_loss" in line]
    page = render_page(
        "jaxis.training",
        "report.html.jinja",
        output=output.name,
        model=config.model.model_name or "the embedded model",
        files=[str(each.path) for each in config.data.train.datasets],
        num_rows=num_rows,
        date=time.strftime("%Y-%m-%d %H:%M %Z"),
        versions={"jaxis": __version__, "jax": importlib.metadata.version("jax")},
        first=steps[0] if steps else None,
        last=steps[-1] if steps else None,
        held_out=held_out,
        plots=plots(lines) if lines else {},
        answers=[line for line in answers if line["step"] == answers[-1]["step"]][:_MAX_ANSWERS],
        settings=_settings(config),
    )
    try:
        (output / REPORT_FILE).write_text(page, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{output / REPORT_FILE} cannot be written: {error.strerror}") from None
    return output / REPORT_FILE


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, by dotted names."""
    found = {}
    for section in ("model", "training", "peft"):
        group = getattr(config, section)
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if value != default and value not in ((), {}):
                found[f"{section}.{field.name}"] = value
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is damaged: a line of it is not JSON") from None


_COLORS = ("#2f6fde", "#d9731a", "#2e9d5b", "#a04fc4")
_TEXT = "#7a8290"  # readable on white and on black
_MAX_POINTS = 600
# Pattern of the metrics in each plot, by its title. Those of held-out rows are drawn as points.
_PLOTS = {
    "Loss": r"(eval_)?loss",
    "Accuracy of the most likely token": r"(eval_)?accuracy",
    "Rewards": r"(eval_)?rewards/(chosen|rejected|margins)",
    "Preferred answers that are more likely": r"(eval_)?rewards/accuracies",
    "Learning rate": r"lr",
    "Norm of the gradient": r"grad_norm",
    "Tokens a second": r"tokens_per_second",
    "Share of the products that the devices could compute (MFU)": r"mfu",
}


def plots(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Plots the lines of metrics.jsonl; returns each SVG by its title. Raises ConfigError if matplotlib is missing."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    found: dict[str, str] = {}
    drawn: set[str] = {"step", "learned_tokens", "peak_memory_bytes"}
    for title, pattern in _PLOTS.items():
        of_plot = [name for name in names if re.fullmatch(pattern, name)]
        if of_plot:
            found[title] = _plot(lines, of_plot)
        drawn.update(of_plot)
    for name in names:
        if name not in drawn:  # such as a user's score
            found[name] = _plot(lines, [name])
    return found


def _plot(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the plots need matplotlib: pip install 'jaxis[train]'") from None
    figure = Figure(figsize=(7.6, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for name, color in zip(names, _COLORS * len(names), strict=False):
        points = _thinned([(line["step"], line[name]) for line in lines if name in line])
        style = "o-" if name.startswith("eval_") else "-"
        axes.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=3.5, linewidth=1.2)
    axes.set_xlabel("step", color=_TEXT)
    axes.tick_params(colors=_TEXT)
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", color=_TEXT, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_TEXT)
    if len(names) > 1:
        figure.legend(loc="outside right upper", frameon=False, labelcolor=_TEXT, fontsize=8)
    file = io.StringIO()
    # Text stays text, which is small and searchable in the browser; the same run gives the same page.
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "jaxis"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :]


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    every = -(-len(points) // _MAX_POINTS)
    return points[(len(points) - 1) % every :: every]
