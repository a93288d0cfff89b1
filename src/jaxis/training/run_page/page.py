"""The page: a run's settings, its metrics and the model's answers, from the files in its folder alone."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError
from jaxis.host.html_page import render_page
from jaxis.training.config import TrainConfig
from jaxis.training.run_log import ANSWERS_FILE, METRICS_FILE
from jaxis.training.run_page.plots import plots
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
        "jaxis.training.run_page",
        "training.html.jinja",
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
