"""What parity_grpo.yaml rewards: called as TRL calls its reward functions."""

from typing import Any


def is_right(completions: list[Any], number: list[int], **_: Any) -> list[float]:
    """1 for an answer that says in the words it was taught whether a number is odd or even, and is right; else 0."""
    right = [f"{each} is {'odd' if each % 2 else 'even'}." for each in number]
    return [float(answer[-1]["content"] == each) for answer, each in zip(completions, right, strict=True)]
