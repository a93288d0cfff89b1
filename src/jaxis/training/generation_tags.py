"""Learned text in chat templates with `{% generation %}` blocks, as transformers defines it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from jaxis.tokenizer.template_worker import GENERATION_MARKS

Span: TypeAlias = tuple[int, int]
"""Start and end of a part of a sequence."""
# Unicode's private use area: no exchanged text contains these characters.
_BEGIN, _END = "\uf8f0", "\uf8f1"
MARKS = dict(zip(GENERATION_MARKS, (_BEGIN, _END), strict=True))
"""Template variables that mark the start and end of generation blocks."""
_TAG = re.compile(r"\{%[-+]?\s*generation\b")


def has_generation_tags(template: str) -> bool:
    return _TAG.search(template) is not None


def without_marks(marked: str) -> tuple[str, list[Span]]:
    """Returns a rendered conversation without `MARKS`, and the spans of its generation blocks in characters."""
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
    """Returns the span of tokens, at `places`, that overlap a span of characters; None if there are none."""
    inside = [i for i, (begin, end) in enumerate(places) if begin < span[1] and end > span[0]]
    return (inside[0], inside[-1] + 1) if inside else None
