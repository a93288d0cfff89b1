"""The plots of a report, as SVG."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxis.bringup.verify.check_layers import ModuleComparison
from jaxis.bringup.verify.verify import VerifyResult
from jaxis.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST_ERROR = 1e-9  # an error of 0 is drawn here
SMALLEST_KL = 1e-15
_COLORS = ("#2f6fde", "#d9731a")
_TEXT = "#7a8290"  # readable on white and on black
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)")


def plots(verifications: Sequence[VerifyResult]) -> dict[str, str]:
    """Draws the plots: title -> SVG. Raises ConfigError if matplotlib is missing."""
    check_matplotlib()
    return {
        "Relative error after each layer": _layer_errors(verifications),
        "Relative error of each module, given the reference's input": _module_errors(verifications),
        "KL divergence from the reference": _divergences(verifications),
    }


def _layer_errors(verifications: Sequence[VerifyResult]) -> str:
    figure, axes = _axes("layer", "relative error")
    for color, result in zip(_COLORS, verifications, strict=False):
        errors = {
            int(match[1]): module.output_error
            for module in _modules(result)
            if (match := _LAYER.fullmatch(module.name)) and module.output_error is not None
        }
        values = [max(errors[i], SMALLEST_ERROR) for i in sorted(errors)]
        axes.plot(sorted(errors), values, "o-", color=color, label=result.dtype, markersize=4, linewidth=1.3)
    axes.locator_params(axis="x", integer=True)
    return _svg(figure)


def _module_errors(verifications: Sequence[VerifyResult]) -> str:
    figure, axes = _axes("module, in the order of the computation", "relative error")
    for color, result in zip(_COLORS, verifications, strict=False):
        errors = [max(m.own_error, SMALLEST_ERROR) for m in _modules(result) if m.own_error is not None]
        axes.plot(range(len(errors)), errors, "o", color=color, label=result.dtype, markersize=3)
        if result.layers is not None:
            axes.axhline(result.layers.limit, color=color, linestyle="--", linewidth=1, label=f"limit, {result.dtype}")
    return _svg(figure)


def _divergences(verifications: Sequence[VerifyResult]) -> str:
    figure, axes = _axes("", "KL, nats")
    labels: list[str] = []
    for color, result in zip(_COLORS, verifications, strict=False):
        named = [(f"{check.prompt_length} tokens", check.comparison) for check in result.logits]
        named += [(path.path, path.comparison) for path in result.paths]
        labels = [name for name, _ in named]
        means = [max(figures.mean_kl_nats, SMALLEST_KL) for _, figures in named]
        largest = [max(figures.max_kl_nats, SMALLEST_KL) for _, figures in named]
        axes.vlines(range(len(named)), means, largest, color=color, linewidth=1)
        axes.plot(range(len(named)), means, "o", color=color, label=f"mean, {result.dtype}", markersize=4)
        axes.plot(range(len(named)), largest, "_", color=color, label=f"largest, {result.dtype}", markersize=8)
        axes.axhline(
            result.gates.mean_kl_nats,
            color=color,
            linestyle="--",
            linewidth=1,
            label=f"limit of the mean, {result.dtype}",
        )
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    return _svg(figure)


def _modules(result: VerifyResult) -> Sequence[ModuleComparison]:
    return () if result.layers is None else result.layers.modules


def check_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing, before anything that takes time."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plots need matplotlib: pip install 'jaxis[verify]'")


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.set_xlabel(xlabel, color=_TEXT)
    axes.set_ylabel(ylabel, color=_TEXT)
    axes.tick_params(colors=_TEXT)
    axes.grid(axis="y", color=_TEXT, alpha=0.25, linewidth=0.6)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_TEXT)
    return figure, axes


def _svg(figure: Figure) -> str:
    figure.legend(loc="outside right upper", frameon=False, labelcolor=_TEXT, fontsize=8)
    file = io.StringIO()
    import matplotlib as mpl

    # Text stays text, which is small and searchable in the browser.
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", transparent=True)
    return file.getvalue()[file.getvalue().index("<svg") :]
