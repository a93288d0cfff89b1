"""What `{% generation %}` blocks of a chat template hold: what is learned, as transformers has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from jaxis.tokenizer.template_worker import GENERATION_MARKS

Span: TypeAlias = tuple[int, int]
"""Where something begins, and where it ends."""
# For private use, by Unicode: no text that is exchanged has them.
_BEGIN, _END = "\uf8f0", "\uf8f1"
MARKS = dict(zip(GENERATION_MARKS, (_BEGIN, _END), strict=True))
"""Variables with which a template writes where its blocks begin and end."""
_TAG = re.compile(r"\{%[-+]?\s*generation\b")


def has_generation_tags(template: str) -> bool:
    """Whether a template has such blocks."""
    return _TAG.search(template) is not None


def without_marks(marked: str) -> tuple[str, list[Span]]:
    """A conversation as it is without `MARKS`, and what the blocks hold of it, in characters."""
    parts = re.split(f"([{_BEGIN}{_END}])", marked)
    text, spans, begin = "", [], 0
    for part in parts:
        if part == _BEGIN:
            begin = len(text)
        elif part == _END:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


def tokens_of(span: Span, places: Sequence[Span]) -> Span | None:
    """The tokens that hold some of a span; None if there are none.

    Args:
      span: Characters.
      places: Where each token begins and ends.
    """
    inside = [i for i, (begin, end) in enumerate(places) if begin < span[1] and end > span[0]]
    return (inside[0], inside[-1] + 1) if inside else None
