"""ik_llama.cpp through its command line tool llama-batched-bench, on a GGUF file repacked for the processor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.bench.run import BatchRun, Load

if TYPE_CHECKING:
    from jaxis.bench.cost import DecodeCost

TOOL = "llama-batched-bench"
# A load this small runs twice, and the second counts: the tool's own warm-up is one prompt of 16 tokens.
MAX_TOKENS_TWICE = 1024
_COLUMNS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")


class IkLlamaCppPeer:
    """See the package. `model` is a GGUF file. `arguments`: "threads"; "binaries", the folder of the tools or None.

    Each run is a process of the tool, which loads the model first. It draws its own tokens.

    Raises:
      FileNotFoundError: The tool is not there.
    """

    def __init__(self, model: Path, arguments: dict[str, Any], _loads: Sequence[Load]) -> None:
        self._model = model
        self._threads = arguments["threads"]
        self._tool = Path(arguments["binaries"] or "", TOOL).resolve()
        if arguments["binaries"] is None or not self._tool.is_file():
            raise FileNotFoundError(
                f"{TOOL} of ik_llama.cpp is not in {arguments['binaries']}: build it, and give its folder with "
                "--ik-llama-cpp"
            )

    @property
    def decode_cost(self) -> DecodeCost:
        from peers.gguf_cost import gguf_decode_cost

        return gguf_decode_cost(self._model)

    def warm_up(self, _load: Load, _rng: np.random.Generator) -> None:
        """Nothing: see `run`."""

    def run(self, load: Load, _rng: np.random.Generator) -> BatchRun:
        """See the package. A decode step's time is the average over the steps, which is all that the tool prints."""
        num_steps = load.output_len - 1
        length = load.batch_size * (load.input_len + num_steps)
        repeat = 2 if num_steps and load.batch_size * load.input_len <= MAX_TOKENS_TWICE else 1
        command = [
            *(str(self._tool), "-m", str(self._model), "-t", str(self._threads), "-fa", "1", "-rtr"),
            *("-c", str(-(-max(length, 256) // 256) * 256), "-npl", str(load.batch_size)),
            *("-npp", ",".join([str(load.input_len)] * repeat), "-ntg", str(num_steps)),
        ]
        with tempfile.TemporaryDirectory() as folder:  # it writes a log where it runs
            child = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if child.returncode != 0:
            raise RuntimeError(f"{TOOL} ended with {child.returncode}: {child.stderr.strip().rpartition(chr(10))[2]}")
        prefill_seconds, decode_seconds = parse_table(child.stdout + child.stderr)[-1]
        return BatchRun(
            [prefill_seconds] * load.batch_size,
            [decode_seconds / num_steps] * num_steps if num_steps else [],
            load.input_len + load.output_len / 2,
            num_steps * load.batch_size,
        )


def parse_table(output: str) -> list[tuple[float, float]]:
    """The seconds of prefill and of all decode steps of each load that llama-batched-bench printed.

    Raises:
      RuntimeError: There is no table as it is known here.
    """
    lines = [line.strip("| ") for line in output.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    if tuple(rows[0] if rows else ()) != _COLUMNS:
        raise RuntimeError(f"{TOOL} printed no table with the columns {', '.join(_COLUMNS)}")
    seconds = [(float(row[4]), float(row[6])) for row in rows[1:] if re.fullmatch(r"\d+", row[0])]
    if not seconds:
        raise RuntimeError(f"{TOOL} printed a table without rows")
    return seconds
