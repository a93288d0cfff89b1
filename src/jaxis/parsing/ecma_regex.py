"""Translation of ECMA-262's regular expressions, the `pattern` of JSON schemas, to the syntax of Rust's `regex`.

The dialects differ in escapes, classes and anchors. So characters with a possible meaning are written as escapes,
classes as lists of ranges, and anchors only at the ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxis.parsing.ecma_negation import negated
from jaxis.parsing.ecma_pattern import (
    MAX_CODE,
    Anchor,
    Choice,
    Look,
    Node,
    PatternError,
    Repeat,
    Series,
    Set,
    parse_pattern,
)

_SURROGATES = (0xD800, 0xDFFF)
_ALL = [(0, 0xD7FF), (0xE000, MAX_CODE)]
# (Must begin at the text's beginning, must end at its end).
_Place = tuple[bool, bool]


@dataclass(frozen=True)
class _Matches:
    """Regular expressions of the strings that a node matches, by their place in the text.

    `empty` has the places whose regular expression matches the empty string.
    """

    texts: dict[_Place, str]
    empty: frozenset[_Place] = frozenset()


_FREE: _Place = (False, False)
_NOTHING = _Matches({_FREE: ""}, frozenset({_FREE}))


@functools.lru_cache(maxsize=1024)
def rust_searches(pattern: str) -> tuple[str, ...]:
    """Returns Rust regular expressions that are all found in a string if, and only if, the pattern is.

    Anchors stand at their ends alone. There are several where the pattern begins with look-aheads. Raises PatternError
    if the pattern is invalid, or cannot be written.
    """
    node = parse_pattern(pattern)
    looks, rest = _first_looks(node)
    begin = Anchor(is_end=False)
    conditions = [negated(look.inner) if look.negated else Series((begin, look.inner)) for look in looks]
    return tuple(dict.fromkeys(_search(part) for part in (*conditions, rest)))


def full_match(search: str) -> str:
    """Returns the expression that matches a whole string in which one of `rust_searches` is found."""
    begin, end = search.startswith("^"), search.endswith("$")
    return _padded((begin, search[begin : len(search) - end], end))


def _first_looks(node: Node) -> tuple[list[Look], Node]:
    """Splits the look-aheads at the beginning of the text from the rest of a pattern."""
    parts = node.parts if isinstance(node, Series) else (node,)
    begin = Anchor(is_end=False)
    count = 0
    while count < len(parts) and (isinstance(parts[count], Look) or parts[count] == begin):
        count += 1
    if begin not in parts[:count]:
        return [], node
    return [part for part in parts[:count] if isinstance(part, Look)], Series((begin, *parts[count:]))


def _search(node: Node) -> str:
    options = [(begin, text, end) for (begin, end), text in _matches(node).texts.items()]
    if not options:
        return r"^[^\x{0}-\x{10ffff}]$"
    if len(options) == 1:
        [(begin, text, end)] = options
        return f"{'^' * begin}{text}{'$' * end}"
    return f"^{_alternatives(_padded(option) for option in options)}$"


def _padded(option: tuple[bool, str, bool]) -> str:
    begin, text, end = option
    return f"{'' if begin else '(?s:.*)'}{text}{'' if end else '(?s:.*)'}"


def _matches(node: Node) -> _Matches:
    match node:
        case Set():
            text = _set_text(node)
            return _Matches({} if text is None else {_FREE: text})
        case Anchor(is_end):
            return _Matches({(not is_end, is_end): ""}, frozenset({(not is_end, is_end)}))
        case Look():
            raise PatternError(f"look-ahead {'(?!' if node.negated else '(?='}...) that is not at the pattern's begin")
        case Series(parts):
            return functools.reduce(_joined, map(_matches, parts), _NOTHING)
        case Choice(options):
            return _either([_matches(option) for option in options])
        case Repeat(inner, least, most):
            return _repeated(_matches(inner), least, most)


def _either(options: Sequence[_Matches]) -> _Matches:
    texts: dict[_Place, list[str]] = {}
    for option in options:
        for place, text in option.texts.items():
            texts.setdefault(place, []).append(text)
    return _of_alternatives(texts, frozenset().union(*(option.empty for option in options)))


def _joined(first: _Matches, second: _Matches) -> _Matches:
    """Concatenates two parts. A part that must end at the text's end has nothing after it; likewise before."""
    texts: dict[_Place, list[str]] = {}
    for (begin, end), text in first.texts.items():
        for (begin_2, end_2), text_2 in second.texts.items():
            if not end and not begin_2:
                texts.setdefault((begin, end_2), []).append(text + text_2)
        if end and any(not begin_2 for begin_2, _ in second.empty):
            texts.setdefault((begin, True), []).append(text)
    for begin_2, end_2 in second.texts:
        if begin_2 and any(not end for _, end in first.empty):
            texts.setdefault((True, end_2), []).append(second.texts[begin_2, end_2])
    empty = {(a or c, b or d) for a, b in first.empty for c, d in second.empty}
    for place in empty - texts.keys():
        texts[place] = [""]
    return _of_alternatives(texts, empty)


def _repeated(inner: _Matches, least: int, most: int | None) -> _Matches:
    if most == 0:
        return _NOTHING
    if not inner.texts.keys() | inner.empty <= {_FREE}:
        return _repeated_at_places(inner, least, most)
    empty = frozenset({_FREE}) if least == 0 else inner.empty
    if not inner.texts:
        return _NOTHING if least == 0 else inner
    return _Matches({_FREE: _times(inner.texts[_FREE], least, most)}, empty)


def _repeated_at_places(inner: _Matches, least: int, most: int | None) -> _Matches:
    """Repeats a part whose first or last repetition may have to stand at the text's beginning or end."""
    free = inner.texts.get(_FREE)
    texts: dict[_Place, list[str]] = {}

    def add(place: _Place, least: int) -> None:
        """Adds the options in which `least` repetitions are not empty; the others are empty, at a place."""
        if free is not None or least == 0:
            texts.setdefault(place, []).append(_times(free, least, most) if free else "")
        for begin, end in inner.texts.keys() - {_FREE}:
            low, high = max(least - 1, 0), None if most is None else most - 1
            if low and (free is None or (begin and end)):
                continue
            text, others = inner.texts[begin, end], _times(free, low, high) if free else ""
            parts = (text,) if begin and end else (text, others) if begin else (others, text)
            texts.setdefault((begin or place[0], end or place[1]), []).append("".join(parts))
        first, last = inner.texts.get((True, False)), inner.texts.get((False, True))
        if first and last and (most is None or most > 1) and (least <= 2 or free):
            between = _times(free, max(least - 2, 0), None if most is None else most - 2) if free else ""
            texts.setdefault((True, True), []).append(first + between + last)

    add(_FREE, least)
    for place in inner.empty:
        add(place, 0)
    empty = {_FREE} if least == 0 else set(inner.empty)
    if most != 1:
        empty |= {(a or c, b or d) for a, b in empty for c, d in inner.empty}
    for place in empty:
        texts.setdefault(place, []).append("")
    return _of_alternatives(texts, empty)


def _of_alternatives(texts: Mapping[_Place, list[str]], empty: Iterable[_Place]) -> _Matches:
    return _Matches({place: _alternatives(dict.fromkeys(found)) for place, found in texts.items()}, frozenset(empty))


def _times(text: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if (least, most) == (1, 1):
        return text
    signs: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    bounds = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    return f"(?:{text}){signs.get((least, most), bounds)}"


def _alternatives(texts: Iterable[str]) -> str:
    texts = list(texts)
    return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


def _set_text(node: Set) -> str | None:
    """Returns a set in Rust's syntax; None if the set is empty."""
    ranges = _merged(node.ranges)
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not node.properties and not node.negated:
        return _char_text(ranges[0][0])
    if not node.properties and (not ranges or ranges == _ALL):
        return "(?s:.)" if node.negated == (not ranges) else None
    shown = "".join(_char_text(a) if a == b else f"{_char_text(a)}-{_char_text(b)}" for a, b in ranges)
    return f"[{'^' * node.negated}{shown}{''.join(node.properties)}]"


def _char_text(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the characters as ascending ranges, without surrogates, which UTF-8 cannot encode."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    first, last = _SURROGATES
    parts = [part for low, high in merged for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return [(low, high) for low, high in parts if low <= high]
