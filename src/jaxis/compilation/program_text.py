"""The costs in the text of a compiled program: traffic, copies, exchanges and kernels."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.compilation.hbm_traffic import KERNEL_CALLS, hbm_traffic, kernel_bytes
from jaxis.compilation.hlo import HloModule, Instruction, parse_hlo

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_OVERLAPPED = "async-collective-start"
_COPIES = frozenset({"copy", "copy-start", "transpose", "concatenate"})
# Opcodes of a fusion that computes nothing.
_ONLY_MOVES = frozenset({"parameter", "bitcast", "reshape", "copy", "transpose", "concatenate"})


@dataclass(frozen=True)
class Copy:
    """An instruction that moves an array from one place or layout in HBM to another, or arrays into one.

    `op_name` is its purpose in the traced program, as far as XLA knows.
    """

    nbytes: int
    array: str
    op_name: str
    is_in_loop: bool


@dataclass(frozen=True)
class Collective:
    """An exchange between the devices, with the bytes of its result on each.

    `group` has the places of the first group of devices that exchange; () if all do. Products run at the same time if
    `is_overlapped`.
    """

    opcode: str
    nbytes: int
    is_in_loop: bool
    group: tuple[int, ...] = ()
    is_overlapped: bool = False


@dataclass(frozen=True)
class Kernel:
    """A call of one of our own kernels, with the bytes that it declares to move; None if it declares none."""

    name: str
    nbytes: int | None
    is_in_loop: bool


@dataclass(frozen=True)
class ProgramText:
    """A program's instructions, on each device.

    Attributes:
      hbm_bytes: Bytes read from and written to HBM, without kernels and loops.
      loop_hbm_bytes: Bytes of all loops' bodies, each once.
      copies: Copies, the largest first; those inside a larger fusion are not seen.
      num_loops: Number of loops, whose conditions a GPU's host has to wait for.
    """

    hbm_bytes: int
    loop_hbm_bytes: int
    copies: Sequence[Copy]
    collectives: Sequence[Collective]
    kernels: Sequence[Kernel]
    num_loops: int


def read_text(text: str) -> ProgramText:
    """Reads the costs in the text of a program that was compiled for a TPU or GPU."""
    module = parse_hlo(text)
    running = list(module.running())
    traffic = [(hbm_traffic(each, computation, module), in_loop) for computation, each, in_loop in running]
    copies = [copy for _, each, in_loop in running if (copy := _copy(each, module, in_loop)) is not None]
    return ProgramText(
        hbm_bytes=sum(nbytes for nbytes, in_loop in traffic if not in_loop),
        loop_hbm_bytes=sum(nbytes for nbytes, in_loop in traffic if in_loop),
        copies=sorted(copies, key=lambda copy: -copy.nbytes),
        collectives=[each for _, one, loop in running if (each := _collective(one, module, loop)) is not None],
        kernels=[
            Kernel(_kernel_name(each), kernel_bytes(each), in_loop)
            for _, each, in_loop in running
            if each.attribute("custom_call_target") in KERNEL_CALLS
        ],
        num_loops=sum(each.opcode == "while" for _, each, _ in running),
    )


def _copy(instruction: Instruction, module: HloModule, in_loop: bool) -> Copy | None:
    if instruction.opcode == "fusion":
        body = module.computations.get(instruction.attribute("calls") or "")
        opcodes = {each.opcode for each in body.instructions.values()} if body is not None else set()
        is_copy = opcodes <= _ONLY_MOVES and not opcodes.isdisjoint(_COPIES)
    else:
        is_copy = instruction.opcode in _COPIES
    if not is_copy or not instruction.arrays[0].is_in_hbm:
        return None
    array = instruction.arrays[0]
    return Copy(array.padded_bytes, str(array), instruction.op_name, in_loop)


def _collective(instruction: Instruction, module: HloModule, in_loop: bool) -> Collective | None:
    if instruction.opcode == "fusion" and instruction.name.startswith(_OVERLAPPED):
        # On TPU, later fusions of products exchange a part each.
        body = module.computations[instruction.attribute("calls") or ""].instructions.values()
        [begun] = (each for inside in body if (each := _collective(inside, module, in_loop)) is not None)
        return dataclasses.replace(begun, is_overlapped=True)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in COLLECTIVES:
        return None
    # What a start returns holds its operands too, and the results after them; an all-reduce's has its size.
    is_pair, size = instruction.opcode != opcode and opcode != "all-reduce", len(instruction.operands)
    arrays = instruction.arrays[size : 2 * size] if is_pair else instruction.arrays
    return Collective(opcode, sum(array.nbytes for array in arrays), in_loop, first_group(instruction.attributes))


def first_group(attributes: str) -> tuple[int, ...]:
    """Returns the first of a collective's `replica_groups`; () if it has none, and all devices exchange.

    They are written out, `{{0,1},{2,3}}`, or as places in a reshaped and transposed range: `[2,2]<=[2,2]T(1,0)`.
    """
    if (match := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes)) is not None:
        return tuple(map(int, match[1].split(",")))
    match = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if match is None:
        return ()
    shape = [int(size) for size in match[3].split(",")]
    places = np.arange(math.prod(shape)).reshape(shape)
    if match[4]:
        places = places.transpose([int(axis) for axis in match[4].split(",")])
    return tuple(places.reshape(int(match[1]), int(match[2]))[0].tolist())


def _kernel_name(instruction: Instruction) -> str:
    """Returns the name given to Pallas, else the kernel function's."""
    return instruction.op_name.removesuffix("/pallas_call").rpartition("/")[2] or instruction.name
