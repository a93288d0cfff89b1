"""Rows as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxis.planning.targets import parse_target
from tests.support.cut_models import NUM_LAYERS
from tools.compiled_programs.rows import BFLOAT16, Row
from tools.compiled_programs.shapes import SHAPES

LARGEST_RATIO = 1.05
ALL_REDUCES = 2 * NUM_LAYERS + 1
HEAD = f"""# Compiled programs

What compilers say of jaxis's programs for accelerators, on a machine that has none: libtpu for TPUs, XLA's CUDA plugin
for NVIDIA GPUs. `python -m tools.compiled_programs` writes this page. Each model has {NUM_LAYERS} layers of its
published sizes. Nothing here has run on an accelerator: a program that compiles fits, and copies and exchanges what it
is seen to, but how fast it is only the machine can tell.

## Families

Weights in bfloat16. A number is what a decode of one token reads from and writes to HBM, without attention, over the
weights that it has to read: more than {LARGEST_RATIO} is bold, and less than 1.00 are programs that find some of their
weights where their previous run has put them. Programs for GPUs do not say which memory an array is in: "yes" is that
they compile. "Copies" is for programs that do not update all caches in place, † for exchanges between devices beside
two all-reduces a layer and one for the embeddings.

"""
WIDTHS = """
## Widths

The same number with other weights: as `--quantization int8` and `int4` make them, or stored as the checkpoint has them
(fp8, MXFP4). Each is on slices whose memory holds the whole model.

"""
FAILURES = """
## What does not compile

[The rows](compiled-programs.json) have what this page leaves out: memory beside weights and caches, the exchanges of
the largest step, and what is exchanged before sampling.

"""


def page(rows: Sequence[Row]) -> str:
    """The page."""
    families = [row for row in rows if row.width == BFLOAT16]
    wanted = {(model, target) for model, widths in SHAPES.items() for targets in widths.values() for target in targets}
    lines = [
        *_grid(families, _by_size(row.target for row in families)),
        WIDTHS,
        *_widths([row for row in rows if (row.model, row.target) in wanted]),
        FAILURES,
        *_table(("model", "on", "error"), _failures(rows)),
    ]
    return HEAD + "\n".join(lines) + "\n"


def _by_size(targets: Iterable[str]) -> list[str]:
    """Targets without repetitions, each accelerator's smallest first."""
    parsed = {target: parse_target(target) for target in targets}
    return sorted(parsed, key=lambda name: (parsed[name].accelerator.name, parsed[name].num_devices))


def _grid(rows: Sequence[Row], targets: Sequence[str]) -> list[str]:
    """A line for each model, a column for each target."""
    cells = {(row.model, row.target): _verdict(row) for row in rows}
    models = sorted({row.model for row in rows})
    lines = [[model, *(cells.get((model, target), "") for target in targets)] for model in models]
    return _table(["model", *targets], lines)


def _widths(rows: Sequence[Row]) -> list[str]:
    """A line for each model and target, a column for each width."""
    widths = list(dict.fromkeys([BFLOAT16, "int8", "int4", *(row.width for row in rows)]))
    cells = {(row.model, row.target, row.width): _verdict(row) for row in rows}
    places = [
        (model, target)
        for model in sorted({row.model for row in rows})
        for target in _by_size(row.target for row in rows if row.model == model)
    ]
    lines = [[*place, *(cells.get((*place, width), "") for width in widths)] for place in places]
    return _table(["model", "on", *widths], lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def _verdict(row: Row) -> str:
    """A row in a word."""
    if not row.steps or (row.error is not None and "1" not in row.steps):
        return "**fails**"
    ratio = "yes" if row.decode_ratio is None else f"{row.decode_ratio:.2f}"
    if row.decode_ratio is not None and row.decode_ratio > LARGEST_RATIO:
        ratio = f"**{ratio}**"
    faults = [] if all(step.in_place for step in row.steps.values()) else ["**copies**"]
    faults += ["**fails** for more tokens"] * (row.error is not None)
    return ", ".join([ratio, *faults]) + (" †" if _exchanges_more(row) else "")


def _exchanges_more(row: Row) -> bool:
    return any(
        set(step.exchanges) - {"all-reduce"} or sum(step.exchanges.values()) > ALL_REDUCES
        for step in row.steps.values()
    )


def _failures(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each error of a model, with all targets that it occurs on."""
    targets: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            targets.setdefault((row.model, row.error.replace("|", "/")), []).append(row.target)
    return [[model, ", ".join(_by_size(on)), error] for (model, error), on in sorted(targets.items())]
