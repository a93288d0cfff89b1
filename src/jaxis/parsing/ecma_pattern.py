"""Parser of ECMA-262's regular expressions, the `pattern` of JSON schemas.

A pattern is read as validators read it: in Unicode mode, or with Annex B's rules if it is invalid there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE = 0x10FFFF
_MAX_REPEATS = 100_000
_MAX_DEPTH = 100
_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")
_QUANTIFIER = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_PROPERTY = re.compile(r"\{([A-Za-z_]+(=[A-Za-z0-9_]+)?)\}")
_GROUP_NAME = re.compile(r"\(\?<[A-Za-z_$][A-Za-z0-9_$]*>")


class PatternError(ValueError):
    """A pattern is invalid, or no regular language can express it; the message names the construct."""


class _SyntaxError(PatternError):
    """A pattern is invalid in the mode in which it is read."""


@dataclass(frozen=True)
class Set:
    """One character out of ranges and Unicode properties, or one that is in none of them."""

    ranges: tuple[tuple[int, int], ...]
    properties: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True)
class Anchor:
    """The beginning of the text, or its end."""

    is_end: bool


@dataclass(frozen=True)
class Look:
    inner: Node
    negated: bool


@dataclass(frozen=True)
class Repeat:
    """A part repeated `least` to `most` times; None is no limit."""

    inner: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Series:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


Node = Set | Anchor | Look | Repeat | Series | Choice


def parse_pattern(pattern: str) -> Node:
    """Parses a pattern into a tree. Raises PatternError if it is invalid, or has a construct that is not supported."""
    try:
        return _Parser(pattern, is_unicode=True).parse()
    except _SyntaxError:
        return _Parser(pattern, is_unicode=False).parse()


class _Parser:
    """Parser of one pattern, by the rules of Unicode mode or those of Annex B."""

    def __init__(self, pattern: str, *, is_unicode: bool) -> None:
        self._pattern = pattern
        self._is_unicode = is_unicode
        self._at = 0
        self._depth = 0
        self._has_names = _GROUP_NAME.search(pattern) is not None
        self._num_groups = len(re.findall(r"\((?!\?)|\(\?<[^=!]", re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)))

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._pattern):
            raise _SyntaxError("unmatched )")
        return node

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError("groups nested too deeply")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._peek() not in "|)":
            at = self._at
            parts.append(self._quantified(self._atom(), is_anchor=self._pattern[at] in "^$"))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _quantified(self, node: Node, *, is_anchor: bool) -> Node:
        bounds = self._quantifier()
        if bounds is None:
            return node
        least, most = bounds
        if is_anchor:
            raise _SyntaxError("nothing to repeat")
        if most is not None and most < least:
            raise _SyntaxError("numbers out of order in {} quantifier")
        if max(least, most or 0) > _MAX_REPEATS:
            raise PatternError(f"more than {_MAX_REPEATS} repetitions")
        self._take("?")
        return Repeat(node, least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        match = _QUANTIFIER.match(self._pattern, self._at)
        if match is None:
            return None
        self._at = match.end()
        low, high = (min(int(text[:9]), 10**9) if text else None for text in (match[1], match[3]))
        assert low is not None
        return low, low if match[2] is None else high

    def _atom(self) -> Node:
        char = self._next()
        match char:
            case "^" | "$":
                return Anchor(char == "$")
            case ".":
                return Set(_LINE_ENDS, negated=True)
            case "[":
                return self._class()
            case "(":
                return self._group()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise _SyntaxError("nothing to repeat")
            case "{" if _QUANTIFIER.match(self._pattern, self._at - 1):
                raise _SyntaxError("nothing to repeat")
            case "{" | "}" | "]" if self._is_unicode:
                raise _SyntaxError(f"lone {char}")
        return _single(self._code(char))

    def _group(self) -> Node:
        rest = self._pattern[self._at - 1 :]
        if rest.startswith(("(?<=", "(?<!")):
            raise PatternError(f"look-behind {rest[:4]}...)")
        is_look = rest.startswith(("(?=", "(?!"))
        if is_look or rest.startswith("(?:"):
            self._at += 2
        elif match := _GROUP_NAME.match(rest):
            self._at += match.end() - 1
        elif flags := re.match(r"\(\?[a-zA-Z-]+[:)]", rest):
            raise PatternError(f"flags {flags[0]}")
        elif rest.startswith("(?"):
            raise _SyntaxError("invalid group (?")
        node = self._choice()
        if not self._take(")"):
            raise _SyntaxError("unterminated group")
        return Look(node, rest[2] == "!") if is_look else node

    def _escape(self) -> Node:
        if self._at >= len(self._pattern):
            raise _SyntaxError("\\ at end of pattern")
        char = self._peek()
        if char in "bB":
            raise PatternError(f"word boundary \\{char}")
        if char == "k" and (self._is_unicode or self._has_names):
            raise PatternError("back-reference \\k")
        if char in "123456789":
            number = re.compile("[0-9]+").match(self._pattern, self._at)
            assert number is not None
            if self._num_groups >= int(number[0][:9]):
                raise PatternError(f"back-reference \\{number[0]}")
        return self._class_escape() or _single(self._character())

    def _class_escape(self) -> Set | None:
        """Reads an escape that is a class of characters; None if the next escape is no class."""
        char = self._peek()
        if ranges := _CLASSES.get(char.lower()):
            self._at += 1
            return Set(ranges, negated=char.isupper())
        if char not in "pP":
            return None
        if not self._is_unicode:
            raise PatternError(f"\\{char} in a pattern that is invalid in Unicode mode")
        match = _PROPERTY.match(self._pattern, self._at + 1)
        if match is None:
            raise _SyntaxError(f"invalid \\{char}")
        self._at = match.end()
        return Set((), (f"\\{char}{{{match[1]}}}",))

    def _character(self, *, in_class: bool = False) -> int:
        """Reads the rest of an escape after its backslash, and returns its character."""
        char = self._next()
        if char in _CONTROLS:
            return _CONTROLS[char]
        match char:
            case "b" | "-" if in_class:
                return 0x8 if char == "b" else 0x2D
            case "c":
                return self._control(in_class=in_class)
            case "x" if (code := self._hex(2)) is not None:
                return code
            case "u":
                return self._unicode_escape()
            case "0" if not re.compile("[0-9]").match(self._pattern, self._at):
                return 0
        return self._own_character(char)

    def _own_character(self, char: str) -> int:
        """Returns the character of an escape without a meaning: the character itself, or an octal number."""
        if self._is_unicode:
            if char not in _SYNTAX:
                raise _SyntaxError(f"invalid escape \\{char}")
        elif octal := re.compile("[0-3][0-7]{0,2}|[4-7][0-7]?").match(self._pattern, self._at - 1):
            self._at = octal.end()
            return int(octal[0], 8)
        return ord(char)

    def _control(self, *, in_class: bool) -> int:
        following = self._pattern[self._at : self._at + 1]
        letters = "[A-Za-z0-9_]" if in_class and not self._is_unicode else "[A-Za-z]"
        if re.fullmatch(letters, following):
            self._at += 1
            return ord(following) % 32
        if self._is_unicode:
            raise _SyntaxError("invalid escape \\c")
        self._at -= 1  # the backslash stands for itself
        return 0x5C

    def _unicode_escape(self) -> int:
        if self._pattern.startswith("{", self._at):
            match = re.compile(r"\{([0-9A-Fa-f]+)\}").match(self._pattern, self._at)
            if not self._is_unicode:
                raise PatternError("\\u{...} in a pattern that is invalid in Unicode mode")
            if match is None or int(match[1], 16) > MAX_CODE:
                raise _SyntaxError("invalid escape \\u")
            self._at = match.end()
            return int(match[1], 16)
        code = self._hex(4)
        if code is None:
            if self._is_unicode:
                raise _SyntaxError("invalid escape \\u")
            return ord("u")
        if 0xD800 <= code <= 0xDBFF and self._pattern.startswith("\\u", self._at):
            self._at += 2
            low = self._hex(4)
            if low is not None and 0xDC00 <= low <= 0xDFFF:
                if not self._is_unicode:  # there, two characters
                    raise PatternError("surrogate pairs in a pattern that is invalid in Unicode mode")
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            self._at -= 2 if low is None else 6
        return code

    def _hex(self, length: int) -> int | None:
        """Reads a number of `length` hexadecimal digits; reads nothing and returns None if there are fewer."""
        text = self._pattern[self._at : self._at + length]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{length}}}", text):
            return None
        self._at += length
        return int(text, 16)

    def _class(self) -> Set:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._take("]"):
            low = self._class_atom()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_atom()
                if isinstance(low, int) and isinstance(high, int):
                    if low > high:
                        raise _SyntaxError("range out of order in character class")
                    ranges.append((low, high))
                    continue
                if self._is_unicode:
                    raise _SyntaxError("invalid character class")
                parts = [low, 0x2D, high]
            else:
                parts = [low]
            for part in parts:
                inner = _single(part) if isinstance(part, int) else part
                ranges += complement(inner.ranges) if inner.negated else inner.ranges
                properties += inner.properties
        return Set(tuple(ranges), tuple(properties), negated)

    def _class_atom(self) -> int | Set:
        char = self._next("unterminated character class")
        if char != "\\":
            return self._code(char)
        if self._at >= len(self._pattern):
            raise _SyntaxError("\\ at end of pattern")
        return self._class_escape() or self._character(in_class=True)

    def _code(self, char: str) -> int:
        if ord(char) > 0xFFFF and not self._is_unicode:  # there, two characters
            raise PatternError(f"{char} in a pattern that is invalid in Unicode mode")
        return ord(char)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self, at_end: str = "unexpected end") -> str:
        if self._at >= len(self._pattern):
            raise _SyntaxError(at_end)
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, char: str) -> bool:
        is_next = self._pattern.startswith(char, self._at)
        self._at += is_next
        return is_next


def _single(code: int) -> Set:
    return Set(((code, code),))


def complement(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the characters outside all of the ranges."""
    result, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            result.append((at, low - 1))
        at = max(at, high + 1)
    return result + ([(at, MAX_CODE)] if at <= MAX_CODE else [])
