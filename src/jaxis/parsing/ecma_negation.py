"""Patterns of the strings that do not begin with a match of another pattern, for negative look-aheads.

The pattern becomes an automaton whose accepting states are exchanged with the others, and then a pattern again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

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
    complement,
)

_MAX_STATES = 1000  # of the automaton in which several can be current
_MAX_SETS = 40  # of those
_ANY = ((0, MAX_CODE),)
_TOO_COMPLEX = "a look-ahead (?!...) of such complexity"


def negated(pattern: Node) -> Node:
    """Returns the pattern of the strings that do not begin with a match of this one.

    Raises PatternError if the pattern is too complex, or has Unicode properties.
    """
    automaton = _Automaton()
    start, end = automaton.state(), automaton.state()
    automaton.add(pattern, start, end)
    automaton.steps[end].append((_ANY, end))
    return _as_pattern(*_determined(automaton, start, end))


class _Automaton:
    """A non-deterministic automaton over characters.

    `steps` has (ranges of characters, next state) of each state's transitions, and `jumps` (anchor that must hold or
    None, next state) of its transitions without a character.
    """

    def __init__(self) -> None:
        self.steps: list[list[tuple[tuple[tuple[int, int], ...], int]]] = []
        self.jumps: list[list[tuple[Anchor | None, int]]] = []

    def state(self) -> int:
        if len(self.steps) >= _MAX_STATES:
            raise PatternError(_TOO_COMPLEX)
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def add(self, node: Node, start: int, end: int) -> None:
        """Adds transitions for the strings of a node, from one state to another."""
        match node:
            case Set():
                if node.properties:
                    raise PatternError(f"{node.properties[0]} in a look-ahead (?!...)")
                self.steps[start].append((tuple(complement(node.ranges)) if node.negated else node.ranges, end))
            case Anchor():
                self.jumps[start].append((node, end))
            case Look():
                raise PatternError("a look-ahead in a look-ahead")
            case Choice(options):
                for option in options:
                    self.add(option, start, end)
            case Series(parts):
                self.jumps[self._add_in_turn(parts, start)].append((None, end))
            case Repeat():
                self._add_repeated(node, start, end)

    def _add_in_turn(self, parts: Iterable[Node], start: int) -> int:
        for part in parts:
            after = self.state()
            self.add(part, start, after)
            start = after
        return start

    def _add_repeated(self, node: Repeat, start: int, end: int) -> None:
        inner = node.inner
        start = self._add_in_turn((inner,) * node.least, start)
        if node.most is None:
            loop = self.state()
            self.jumps[start].append((None, loop))
            self.add(inner, loop, loop)
            start = loop
        for _ in range((node.most or node.least) - node.least):
            self.jumps[start].append((None, end))
            middle = self.state()
            self.add(inner, start, middle)
            start = middle
        self.jumps[start].append((None, end))

    def reached(self, states: Iterable[int], anchors: tuple[Anchor, ...]) -> frozenset[int]:
        """Returns the states that are reached without a character, where these anchors hold."""
        found, left = set(states), list(states)
        while left:
            for anchor, target in self.jumps[left.pop()]:
                if target not in found and (anchor is None or anchor in anchors):
                    found.add(target)
                    left.append(target)
        return frozenset(found)


def _determined(
    automaton: _Automaton, start: int, end: int
) -> tuple[list[dict[int, list[tuple[int, int]]]], list[int]]:
    """Returns the transitions of the deterministic automaton, from state 0, and the states that do not accept."""
    cuts = sorted(
        {0, MAX_CODE + 1, *(x for steps in automaton.steps for r, _ in steps for a, b in r for x in (a, b + 1))}
    )
    begin, finish = Anchor(is_end=False), Anchor(is_end=True)
    sets = [automaton.reached([start], (begin,))]
    # At the text's begin, anchors hold that do not hold elsewhere: the first set is no other's equal.
    known: dict[frozenset[int], int] = {}
    steps: list[dict[int, list[tuple[int, int]]]] = []
    for current in sets:
        targets: dict[int, list[tuple[int, int]]] = {}
        for low, after in pairwise(cuts):
            following = {t for s in current for r, t in automaton.steps[s] if any(a <= low <= b for a, b in r)}
            reached = automaton.reached(following, ())
            if reached not in known:
                known[reached] = len(sets)
                sets.append(reached)
                if len(sets) > _MAX_SETS:
                    raise PatternError(_TOO_COMPLEX)
            targets.setdefault(known[reached], []).append((low, after - 1))
        steps.append(targets)
    others = []
    for i, current in enumerate(sets):
        anchors = (begin, finish) if i == 0 else (finish,)
        if end not in automaton.reached(current, anchors):
            others.append(i)
    return steps, others


def _as_pattern(steps: list[dict[int, list[tuple[int, int]]]], ends: list[int]) -> Node:
    """Returns the pattern of the strings that lead from the first state to one of `ends`, by state elimination."""
    final = len(steps)
    edges: dict[tuple[int, int], Node] = {
        (source, target): Set(tuple(ranges))
        for source, targets in enumerate(steps)
        for target, ranges in targets.items()
    }
    edges |= {(-1, 0): Series(()), **{(end, final): Series(()) for end in ends}}
    left = set(range(final))
    while left:
        state = min(left, key=lambda s: sum((s in edge) for edge in edges))
        left.remove(state)
        loop = edges.pop((state, state), None)
        before = [(source, edges.pop((source, target))) for source, target in list(edges) if target == state]
        after = [(target, edges.pop((source, target))) for source, target in list(edges) if source == state]
        for source, first in before:
            for target, last in after:
                through = Series((first, *(() if loop is None else (Repeat(loop, 0, None),)), last))
                other = edges.get((source, target))
                edges[source, target] = through if other is None else Choice((other, through))
    return Series((Anchor(is_end=False), edges.get((-1, final), Set(())), Anchor(is_end=True)))
