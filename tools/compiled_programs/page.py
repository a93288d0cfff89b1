"""Rows as the appendix of docs/accelerators.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxis.compilation.targets import parse_target
from tests.support.cut_models import NUM_LAYERS
from tools.compiled_programs.rows import BFLOAT16, Row

LARGEST_RATIO = 1.05
ALL_REDUCES = 2 * NUM_LAYERS + 1
HEADING = "## Appendix: programs that compile\n"
TEXT = f"""
`python -m tools.compiled_programs` writes this section from [its rows](compiled-programs.json), which also have int8,
int4 and stored weights, temporaries and exchanges. Each model has {NUM_LAYERS} layers of its published sizes, in
bfloat16. "Reads" is the most that a decode of one token moves through a TPU's memory, without attention, over the
weights that it has to read: more than {LARGEST_RATIO} is bold. † marks more exchanges between devices than two
all-reduces a layer and one for the embeddings; "copies", programs that do not update all caches in place.

"""


def with_appendix(page: str, rows: Sequence[Row]) -> str:
    """The page, with its last section made of the rows."""
    families = [row for row in rows if row.width == BFLOAT16]
    lines = [
        *_table(("models", "compile for", "reads", "do not compile for"), _lines(_by_model(families))),
        "",
        *_table(("model", "on", "error"), _failures(rows)),
    ]
    return page.partition(HEADING)[0] + HEADING + TEXT + "\n".join(lines) + "\n"


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each model, each accelerator's smallest target first."""
    parsed = {row.target: parse_target(row.target) for row in rows}

    def size(row: Row) -> tuple[str, int]:
        return parsed[row.target].accelerator.name, parsed[row.target].num_devices

    return [
        sorted((row for row in rows if row.model == model), key=size) for model in sorted({row.model for row in rows})
    ]


def _lines(models: Sequence[Sequence[Row]]) -> list[list[str]]:
    """A line for all models that compile for the same targets in the same way."""
    alike: dict[tuple[str, str], list[Sequence[Row]]] = {}
    for rows in models:
        failed = [row for row in rows if not row.steps or (row.error is not None and "1" not in row.steps)]
        cells = ", ".join(_target(row) for row in rows if row not in failed), ", ".join(row.target for row in failed)
        alike.setdefault(cells, []).append(rows)
    return [
        [", ".join(rows[0].model for rows in same), compiled, _reads(row for rows in same for row in rows), failed]
        for (compiled, failed), same in alike.items()
    ]


def _reads(rows: Iterable[Row]) -> str:
    """The most that a decode of any of them reads."""
    reads = max((row.decode_ratio for row in rows if row.decode_ratio is not None), default=None)
    return "" if reads is None else f"**{reads:.2f}**" if reads > LARGEST_RATIO else f"{reads:.2f}"


def _target(row: Row) -> str:
    """A target for which a model compiles, and what stands out there."""
    faults = [] if all(step.in_place for step in row.steps.values()) else ["**copies**"]
    faults += ["**fails** for more tokens"] * (row.error is not None)
    return row.target + (" †" if _exchanges_more(row) else "") + (f" ({', '.join(faults)})" if faults else "")


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


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
    return [[model, ", ".join(sorted(on)), error] for (model, error), on in sorted(targets.items())]
