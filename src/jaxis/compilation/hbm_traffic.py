"""The bytes that a compiled program's instructions read from and write to HBM, padding included.

A fusion that only slices an operand reads the slices; one that updates an operand in place writes the update. A kernel
of our own declares its bytes itself, with Pallas's `cost_estimate`.
"""

from __future__ import annotations

import re
from collections import defaultdict

from jaxis.compilation.hlo import Computation, HloArray, HloModule, Instruction

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
    """Counts the bytes that an instruction moves from and to HBM; 0 for a kernel, see `kernel_bytes`."""
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
    """Returns the bytes that a Pallas kernel declares it moves; None if it declares none."""
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
    """Returns the bytes that a fusion writes, and the names of the parameters that it updates in place."""
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
    """Returns the instruction whose elements this one only names, converts or copies."""
    while instruction.opcode in ("bitcast", "convert", "copy"):
        instruction = body.instructions[instruction.operands[0]]
    return instruction


def _in_hbm(array: HloArray) -> int:
    return array.padded_bytes if array.is_in_hbm else 0
