"""What the text of a compiled program says that it costs: traffic, copies, exchanges and kernels."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.compilation.hlo import Computation, HloArray, HloModule, Instruction, parse_hlo

# How many bytes a compiled program's instructions read from and write to HBM, padding included.
#
# A fusion that only slices an operand reads the slices; one that updates an operand in place writes the update. What
# a kernel of our own reads is known to the kernel alone, which says so as Pallas's `cost_estimate`.


_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
     "iota", "while", "call", "conditional", "opt-barrier", "optimization-barrier"}
)  # fmt: skip
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})
_ASYNC_COPIES = frozenset({"copy-start", "all-gather-start", "collective-permute-start"})
# Custom calls that are hints, or names for memory.
_FREE_CALLS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "SliceBitcast", "ResizeBitcast", "Sharding", "AssumeGatherIndicesInBound"}
)
KERNEL_CALLS = frozenset({"tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "mosaic_gpu"})
"""Targets of the custom calls that are Pallas kernels."""
_BYTES_ACCESSED = re.compile(r'"bytes_accessed"\s*:\s*"?(\d+)')


def hbm_traffic(instruction: Instruction, computation: Computation, module: HloModule) -> int:
    """Bytes that an instruction moves from and to HBM; 0 for a kernel, see `kernel_bytes`."""
    opcode, operands = instruction.opcode, computation.operands(instruction)
    if _is_free(instruction):
        return 0
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * operands[1 if opcode == "dynamic-update-slice" else -1].hbm_bytes
    if opcode in _SLICES:
        return 2 * instruction.hbm_bytes
    if opcode == "slice-start":  # ((source), destination, context): a piece of the source moves
        destination = instruction.arrays[1]
        return destination.padded_bytes + _in_hbm(destination)
    if opcode in _ASYNC_COPIES:  # (destination, source, context)
        return sum(operand.hbm_bytes for operand in operands) + _in_hbm(instruction.arrays[0])
    body = module.computations.get(instruction.attribute("calls") or "")
    if opcode == "fusion" and body is not None and body.root:
        return _fusion_traffic(instruction, operands, body)
    return instruction.hbm_bytes + sum(operand.hbm_bytes for operand in operands)


def _is_free(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target") in KERNEL_CALLS | _FREE_CALLS
    # A program begins with what the end of its previous run has already fetched into a TPU's VMEM.
    is_prefetched = "cross_program_prefetch_index" in instruction.attributes
    return is_prefetched or instruction.opcode in _FREE or instruction.opcode.endswith("-done")


def kernel_bytes(instruction: Instruction) -> int | None:
    """Bytes that a Pallas kernel says it moves; None if it does not say."""
    match = _BYTES_ACCESSED.search(instruction.attributes)
    return int(match[1]) if match else None


def _fusion_traffic(instruction: Instruction, operands: list[Instruction], body: Computation) -> int:
    readers: dict[str, list[Instruction]] = defaultdict(list)
    for inner in body.instructions.values():
        for name in inner.operands:
            readers[name].append(inner)
    total, updated = _written(instruction, body)
    for i, operand in enumerate(operands):
        parameter = body.parameters.get(i)
        size = operand.hbm_bytes
        if not size or parameter is None or parameter in updated:
            continue
        uses = readers[parameter]
        if uses and all(use.opcode in _SLICES and use.operands[0] == parameter for use in uses):
            size = min(size, sum(array.padded_bytes for use in uses for array in use.arrays))
        total += size
    return total


def _written(instruction: Instruction, body: Computation) -> tuple[int, set[str]]:
    """Bytes that a fusion writes, and the names of the parameters that it updates in place."""
    root = body.instructions[body.root]
    parts = body.operands(root) if root.opcode == "tuple" else [root]
    total, updated = 0, set()
    for part, array in zip(parts, instruction.arrays, strict=False):
        part = _source(body, part)
        if part.opcode in ("dynamic-update-slice", "scatter"):
            updated.add(_source(body, body.instructions[part.operands[0]]).name)
            update = body.instructions[part.operands[1 if part.opcode == "dynamic-update-slice" else -1]]
            total += 2 * sum(each.padded_bytes for each in update.arrays)
        else:
            total += _in_hbm(array)
    return total, updated


def _source(body: Computation, instruction: Instruction) -> Instruction:
    """The instruction whose elements this one only names, converts or copies."""
    while instruction.opcode in ("bitcast", "convert", "copy"):
        instruction = body.instructions[instruction.operands[0]]
    return instruction


def _in_hbm(array: HloArray) -> int:
    return array.padded_bytes if array.is_in_hbm else 0


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_COPIES = frozenset({"copy", "copy-start", "transpose", "concatenate"})
# What a fusion consists of that computes nothing.
_ONLY_MOVES = frozenset({"parameter", "bitcast", "reshape", "copy", "transpose", "concatenate"})


@dataclass(frozen=True)
class Copy:
    """An instruction that moves an array from one place or layout in HBM to another, or arrays into one.

    Attributes:
      nbytes: Of the copy.
      array: Its type and layout.
      op_name: What it is for in the traced program, as far as XLA knows.
      is_in_loop: Whether it may happen any number of times.
    """

    nbytes: int
    array: str
    op_name: str
    is_in_loop: bool


@dataclass(frozen=True)
class Collective:
    """An exchange between the devices.

    Attributes:
      opcode: One of COLLECTIVES.
      nbytes: Of its result on each device.
      is_in_loop: Whether it may happen any number of times.
      group: The places of the first group of devices that exchange; () if all do.
    """

    opcode: str
    nbytes: int
    is_in_loop: bool
    group: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A call of one of our own kernels.

    Attributes:
      name: Of the Pallas kernel.
      nbytes: What it moves by its own account; None if it gives none.
      is_in_loop: Whether it may run any number of times.
    """

    name: str
    nbytes: int | None
    is_in_loop: bool


@dataclass(frozen=True)
class ProgramText:
    """A program's instructions, on each device.

    Attributes:
      hbm_bytes: Read from and written to HBM, without kernels and loops.
      loop_hbm_bytes: The same by all loops' bodies, each once.
      copies: The largest first; those that are part of a larger fusion are not seen.
      collectives: In order of the program.
      kernels: In order of the program.
      num_loops: Loops, whose conditions a GPU's host has to wait for.
    """

    hbm_bytes: int
    loop_hbm_bytes: int
    copies: Sequence[Copy]
    collectives: Sequence[Collective]
    kernels: Sequence[Kernel]
    num_loops: int


def read_text(text: str) -> ProgramText:
    """The costs in the text of a program that was compiled for a TPU or GPU."""
    module = parse_hlo(text)
    running = list(module.running())
    traffic = [(hbm_traffic(each, computation, module), in_loop) for computation, each, in_loop in running]
    copies = [copy for _, each, in_loop in running if (copy := _copy(each, module, in_loop)) is not None]
    return ProgramText(
        hbm_bytes=sum(nbytes for nbytes, in_loop in traffic if not in_loop),
        loop_hbm_bytes=sum(nbytes for nbytes, in_loop in traffic if in_loop),
        copies=sorted(copies, key=lambda copy: -copy.nbytes),
        collectives=[each for _, instruction, loop in running if (each := _collective(instruction, loop)) is not None],
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


def _collective(instruction: Instruction, in_loop: bool) -> Collective | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in COLLECTIVES:
        return None
    # What a start returns holds its operands too, and the result after them; an all-reduce's has its size.
    is_pair = instruction.opcode != opcode and opcode != "all-reduce"
    arrays = instruction.arrays[len(instruction.operands) :] if is_pair else instruction.arrays
    return Collective(opcode, max(array.nbytes for array in arrays), in_loop, first_group(instruction.attributes))


def first_group(attributes: str) -> tuple[int, ...]:
    """The first of a collective's `replica_groups`; () where it has none, and all devices exchange.

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
    """The name that Pallas was given, else the kernel function's."""
    return instruction.op_name.removesuffix("/pallas_call").rpartition("/")[2] or instruction.name
