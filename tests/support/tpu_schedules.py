"""What libtpu's scheduler made of a Pallas kernel: its bundles of instructions, and registers that did not suffice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Schedule:
    """A kernel's instructions, in bundles of those that are issued at once.

    Attributes:
      bundles: Their number, a floor for the cycles of one pass.
      slots: How many instructions each kind of unit has. Registers are spilled with VSTORE:SPILL and VLOAD:FILL.
    """

    bundles: int
    slots: dict[str, int]

    @property
    def spills(self) -> int:
        """Vector registers that are stored and loaded again because there are too few."""
        return self.slots.get("VSTORE:SPILL", 0) + self.slots.get("VLOAD:FILL", 0)


def schedules(code: str, folder: Path) -> dict[str, Schedule]:
    """By kernel, of the programs that a Python program compiles; it runs in a process, to tell libtpu what to write."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    # A program from JAX's cache would not be compiled.
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    found = {}
    for path in folder.glob("*final_hlo-static-per-bundle-utilization.txt"):
        name = re.match(r"\d+-(.*?)(\.\d+)?-\d+-final", path.name)
        assert name is not None
        _, units, _, _, *bundles = path.read_text().splitlines()
        rows = [[int(n) for n in line.split()] for line in bundles if line.strip()]
        slots = (sum(column) for column in zip(*rows, strict=True))
        found[name[1]] = Schedule(len(rows), dict(zip(map(str.strip, units.split(",")), slots, strict=True)))
    return found
