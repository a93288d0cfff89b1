"""Reads the text of a compiled program: XLA's HLO, scheduled, with the layouts and memories that were chosen.

On TPU a layout names its tiles, `T(8,128)(2,1)`, to whose size an array is padded, and its memory: `S(1)` is on the
chip, without it the array is in HBM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Bits of the types whose names do not end with them.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_ASSIGNMENT = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BRACKETS = {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}


@dataclass(frozen=True)
class HloArray:
    """The type, layout and memory of an array.

    Attributes:
      dtype: HLO's name of the type, such as "bf16".
      layout: Text in its braces, such as "1,0:T(8,128)(2,1)S(1)".
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]" + (f"{{{self.layout}}}" if self.layout else "")

    @property
    def is_in_hbm(self) -> bool:
        """True if it is in the device's main memory, and not in one on the chip or in the host's."""
        return re.search(r"S\([1-9]\d*\)", self.layout) is None

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) * self._bits // 8

    @property
    def padded_bytes(self) -> int:
        """Bytes of its whole tiles."""
        order = [int(axis) for axis in self.layout.partition(":")[0].split(",") if axis.strip().isdigit()]
        dims = [self.dims[axis] for axis in reversed(order)] if len(order) == len(self.dims) else list(self.dims)
        if (tile := re.search(r"T\(([\d,]+)\)", self.layout)) is not None:
            sizes = [int(size) for size in tile[1].split(",")]
            for i in range(1, min(len(sizes), len(dims)) + 1):
                dims[-i] = -(-dims[-i] // sizes[-i]) * sizes[-i]
        return math.prod(dims) * self._bits // 8

    @property
    def _bits(self) -> int:
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        return _BITS[self.dtype] if self.dtype in _BITS else int(digits[1]) if digits else 8


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      arrays: Arrays of its result, a tuple's elements one after the other.
      attributes: Text behind its operands.
      arguments: Text of its operands: the number of a parameter.
    """

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]
    operands: tuple[str, ...]
    attributes: str
    arguments: str

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the result's arrays that are in HBM."""
        return sum(array.padded_bytes for array in self.arrays if array.is_in_hbm)

    @property
    def op_name(self) -> str:
        """Name of its origin in the traced program; "" if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def attribute(self, name: str) -> str | None:
        """Returns the value of an attribute that is one word, such as `calls`; None if there is none."""
        match = re.search(rf'\b{name}="?%?([\w.\-$]+)', self.attributes)
        return match[1] if match else None


@dataclass
class Computation:
    """Instructions by name, in the order in which they run."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""
    parameters: dict[int, str] = field(default_factory=dict)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclass(frozen=True)
class HloModule:
    """A program: its computations by name, and the name of the one that runs."""

    computations: Mapping[str, Computation]
    entry: str

    def running(self) -> Iterator[tuple[Computation, Instruction, bool]]:
        """Yields each instruction of the entry and of the computations that it calls, without the insides of fusions.

        Each comes with its computation, and True if it is in a loop, and may run any number of times.
        """
        waiting, seen = [(self.entry, False)], set()
        while waiting:
            name, in_loop = waiting.pop()
            if name in seen or name not in self.computations:
                continue
            seen.add(name)
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                yield computation, instruction, in_loop
                if instruction.opcode == "while":
                    waiting += [(called, True) for called in _called(instruction, "body", "condition")]
                elif instruction.opcode in ("call", "conditional", "async-start"):
                    called = _called(instruction, "to_apply", "calls", "true_computation", "false_computation")
                    waiting += [(each, in_loop) for each in called + _branches(instruction)]


def parse_hlo(text: str) -> HloModule:
    """Parses the program of `Compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if (head := _HEAD.match(line)) is not None:
            current = computations.setdefault(head[2], Computation())
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _ASSIGNMENT.match(line)) is not None:
            instruction = _instruction(match[2], match[3])
            current.instructions[instruction.name] = instruction
            if match[1]:
                current.root = instruction.name
            if instruction.opcode == "parameter":
                current.parameters[int(instruction.arguments)] = instruction.name
    return HloModule(computations, entry)


def arrays_of(text: str) -> tuple[HloArray, ...]:
    return tuple(
        HloArray(dtype, tuple(int(dim) for dim in dims.split(",") if dim), layout)
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _instruction(name: str, text: str) -> Instruction:
    result, rest = _split_at_depth_zero(text, " ")
    opcode, _, rest = rest.partition("(")
    arguments, attributes = _split_at_depth_zero(rest, ")")
    operands = tuple(_OPERAND.findall(arguments))
    return Instruction(name, opcode.strip(), arrays_of(result), operands, attributes, arguments)


def _split_at_depth_zero(text: str, end: str) -> tuple[str, str]:
    """Splits a string at the first `end` outside of brackets."""
    depth = 0
    for i, character in enumerate(text):
        if depth == 0 and character == end:
            return text[:i], text[i + 1 :]
        depth += _BRACKETS.get(character, 0)
    return text, ""


def _called(instruction: Instruction, *attributes: str) -> list[str]:
    return [called for name in attributes if (called := instruction.attribute(name)) is not None]


def _branches(instruction: Instruction) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    return _OPERAND.findall(match[1]) if match else []
