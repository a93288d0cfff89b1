"""What the embedded model is measured by while it is trained; called as TRL calls its reward functions."""

from typing import Any


def exact(completions: list[Any], reference: list[str], **_: Any) -> list[float]:
    """1 for an answer that is right word for word, else 0."""
    return [float(answer[-1]["content"] == each) for answer, each in zip(completions, reference, strict=True)]
