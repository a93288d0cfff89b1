"""Report of NVIDIA's assembler on the kernels of a program that was compiled for a GPU that is not there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True)
class AssembledKernel:
    """A kernel as ptxas describes it.

    Attributes:
      name: Its name in PTX.
      registers: Registers of each thread.
      spilled_bytes: Written to and read from memory by each thread, for lack of registers.
    """

    name: str
    registers: int
    spilled_bytes: int


def compiled_kernels(lowered: jax.stages.Lowered, folder: Path) -> list[AssembledKernel]:
    """Compiles a program for an NVIDIA GPU -> its kernels, XLA's fusions among them.

    Args:
      lowered: The program.
      folder: An empty one, for the compiler's dumps.
    """
    lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*"})
    kernels = [kernel for path in sorted(folder.glob("*.ptx")) for kernel in _assemble(path)]
    assert kernels, "the compiler wrote no PTX"
    return kernels


def _assemble(path: Path) -> list[AssembledKernel]:
    arch = re.search(r"^\.target (sm_\w+)", path.read_text(), re.MULTILINE)
    if arch is None:  # constants only
        return []
    command = [_ptxas(), "-v", f"-arch={arch[1]}", str(path), "-o", str(path.with_suffix(".cubin"))]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [
        AssembledKernel(
            name=entry.partition("'")[0],
            registers=int(re.findall(r"Used (\d+) registers", entry)[0]),
            spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", entry))),
        )
        for entry in report.split("Compiling entry function '")[1:]
    ]


def _ptxas() -> str:
    """NVIDIA's wheels bring one, or else the system has it."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("**/bin/ptxas"))
    return str(found[0]) if found else "ptxas"
