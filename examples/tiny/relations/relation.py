"""Relation: one kind of fact, and how it is asked for."""

from dataclasses import dataclass

Row = dict[str, str]


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
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str
    brief: str
    weight: float
    eval_count: int


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())
