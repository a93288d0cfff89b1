"""Questions about the tables: each relation's rows, phrasings to train on, others held out, and the one answer."""

import operator
from dataclasses import dataclass

from tiny.tables import TABLES, WORDS, Row, read

SUM_CATEGORIES = ("addition", "subtraction", "multiplication")


@dataclass(frozen=True)
class Relation:
    """One kind of fact. Templates are `str.format` strings over the row's columns.

    Attributes:
        category: name in the evaluation file.
        rows: the facts.
        train: question phrasings that the corpus uses.
        held_out: question phrasings that only the evaluation file uses.
        answer: the answer, a sentence.
        brief: the answer where the system prompt asks for a short one.
        weight: how often the corpus asks about it, relative to the others.
        eval_count: how many evaluation questions it gets.
    """

    category: str
    rows: tuple[Row, ...]
    train: list[str]
    held_out: list[str]
    answer: str
    brief: str
    weight: float
    eval_count: int


def _neighbours(names: list[str], step: int) -> tuple[Row, ...]:
    return tuple({"given": name, "wanted": names[(i + step) % len(names)]} for i, name in enumerate(names))


def _arithmetic(largest: int, sign: str) -> tuple[Row, ...]:
    """Every `a sign b` with operands from 0 to `largest`; subtraction only where the result is not negative."""
    compute = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign]
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1) if sign != "-" or a >= b]
    return tuple({"a": str(a), "b": str(b), "result": str(compute(a, b))} for a, b in pairs)


_ROWS = TABLES | {
    "opposites": (
        *TABLES["opposites"],
        *({"word": row["opposite"], "opposite": row["word"]} for row in TABLES["opposites"]),
    ),
    "days_after": _neighbours(WORDS["days"], 1),
    "days_before": _neighbours(WORDS["days"], -1),
    "months_after": _neighbours(WORDS["months"], 1),
    "months_before": _neighbours(WORDS["months"], -1),
    "months": tuple(
        {"month": month, "days": str(days), "ordinal": ordinal}
        for month, days, ordinal in zip(WORDS["months"], WORDS["month_lengths"], WORDS["ordinals"], strict=True)
    ),
    "planets": tuple(
        {"planet": planet, "ordinal": ordinal}
        for planet, ordinal in zip(WORDS["planets"], WORDS["ordinals"], strict=False)
    ),
    "additions": _arithmetic(20, "+"),
    "subtractions": _arithmetic(20, "-"),
    "multiplications": _arithmetic(12, "*"),
}
RELATIONS = tuple(Relation(**relation | {"rows": _ROWS[relation["rows"]]}) for relation in read("relations"))
