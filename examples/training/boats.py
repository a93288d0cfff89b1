"""A task made here: to describe a boat in one of four forms."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMS = (
    "The {name} is a {colour} {kind}.",
    "That {kind} is {colour}, and her name is {name}.",
    "She is the {name}, a {kind} painted {colour}.",
    "A {colour} {kind} called {name}.",
)
NAMES = ("Anna", "Bella", "Clara", "Dora", "Emma", "Flora", "Greta", "Hilda", "Ida", "Julia", "Karla", "Lena", "Maria")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "golden", "silver")
KINDS = ("ship", "boat", "ferry", "barge", "raft", "yacht")


def draw_boats(count: int, seed: int) -> list[dict[str, str]]:
    """Draws different boats."""
    every = itertools.product(NAMES, COLOURS, KINDS)
    boats = [{"name": name, "colour": colour, "kind": kind} for name, colour, kind in every]
    return random.Random(seed).sample(boats, count)


def write(path: Path, boats: Sequence[dict[str, str]], *, wrong: float = 0.0, hints: bool = False) -> Path:
    """Writes a row for each boat, answered in one of the forms; in a share of the rows, the colour is drawn.

    With hints, the answer is also `privileged_context`, which only a teacher reads.
    """
    drawn = random.Random(path.stem)
    with path.open("w", encoding="utf-8") as file:
        for boat in boats:
            said = {**boat, "colour": drawn.choice(COLOURS)} if drawn.random() < wrong else boat
            answer = drawn.choice(FORMS).format(**said)
            row = {
                "prompt": [{"role": "user", "content": "Describe {name}: {kind}, {colour}.".format(**boat)}],
                "completion": [{"role": "assistant", "content": answer}],
                "right": [form.format(**boat) for form in FORMS],
            }
            file.write(json.dumps({**row, "privileged_context": answer} if hints else row) + "\n")
    return path


def right(completions: Sequence[Any], right: Sequence[Sequence[str]], **_: object) -> list[float]:
    """Scores answers: 1 for one that is right in one of the forms."""
    return [float(each[-1]["content"].strip() in wanted) for each, wanted in zip(completions, right, strict=True)]
