"""Compares jaxis with transformers and llama.cpp on the same weights and the same cores, in turn, in one run.

    python benchmarks/compare.py --out results
    python benchmarks/compare.py --threads 2 --engines jaxis-int8,llama.cpp-q8_0 --rounds 5
    python benchmarks/compare.py --sweeps context,batch,size --rounds 1 --out results
    python benchmarks/compare.py --shape qwen3-moe-1.5b --engines jaxis-bf16,transformers-bf16 --out results
    python benchmarks/compare.py --shape deepseek-v2-1.7b --engines jaxis-bf16,transformers-bf16 --out results
    python benchmarks/compare.py --engines jaxis-q4_k_m.gguf,llama.cpp-q4_k_m.gguf --out results
    python benchmarks/compare.py --model model.gguf --out results

Without --model, checkpoints of Qwen3's shapes with random weights are made: speed does not depend on the weights. Every
measurement is a process of its own, and engines take turns, so that what else the machine does falls on all of them.
Each round also measures the machine's limits, beside which the figures stand.

The folder --out gets results.json, results.md and the plots of the sweeps. `report.py` makes them again from the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import DEFAULT_ENGINES, DEFAULT_GGUF_ENGINES, ENGINES, Engine, prepare_weights
from jaxis.bench.cost import expert_share, prefill_cost
from jaxis.bench.limits import measure_limits
from jaxis.bench.process import describe_machine
from jaxis.bench.run import Load
from jaxis.config import ModelConfig, VllmConfig
from jaxis.errors import JaxisError
from jaxis.host.machine import usable_cores
from jaxis.loading.open_checkpoint import read_hf_config
from random_checkpoint import SHAPES, write_random_checkpoint
from report import write_report

YARDSTICK = "qwen3-0.6b"
LOADS = (Load(1, 128, 32), Load(1, 1024, 16), Load(16, 128, 16))
SWEEPS = {
    "context": [(YARDSTICK, Load(1, length, 8)) for length in (1024, 2048, 4096, 8192, 16384)],
    "batch": [(YARDSTICK, Load(size, 128, 16)) for size in (1, 2, 4, 8, 16, 32, 64)],
    "size": [(shape, Load(1, 128, 16)) for shape, config in SHAPES.items() if not expert_share(config)],
}
# Whichever of them an engine's libraries read.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    arguments = parse_arguments()
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.sched_setaffinity(0, cores)  # what is started from here inherits it
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxis-compare-") as scratch:
        comparison = Comparison(arguments, arguments.work or Path(scratch))
        results = comparison.run()
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(write_report(results, arguments.out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: random weights of --shape)")
    parser.add_argument("--shape", choices=SHAPES, default=YARDSTICK, help="of made-up weights (default: %(default)s)")
    default = f"{','.join(DEFAULT_ENGINES)}; of a GGUF file: {','.join(DEFAULT_GGUF_ENGINES)}"
    parser.add_argument("--engines", help=f"any of {', '.join(ENGINES)} (default: {default})")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="cores for each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is measured (default: %(default)s)")
    parser.add_argument("--sweeps", default="", help=f"further loads, of {','.join(SWEEPS)} (default: none)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder that keeps checkpoints for the next run (default: temporary)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.engines is None:
        is_gguf = arguments.model is not None and arguments.model.is_file()
        arguments.engines = ",".join(DEFAULT_GGUF_ENGINES if is_gguf else DEFAULT_ENGINES)
    arguments.engines = [name for name in arguments.engines.split(",") if name]
    arguments.sweeps = [name for name in arguments.sweeps.split(",") if name]
    for option, names, known in (("engines", arguments.engines, ENGINES), ("sweeps", arguments.sweeps, SWEEPS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option}: {', '.join(unknown)}: known are {', '.join(known)}")
    if not 1 <= arguments.threads <= usable_cores():
        parser.error(f"--threads must be 1 to {usable_cores()}, the cores that this process may use")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.model is not None and arguments.shape != YARDSTICK:
        parser.error("--model and --shape name two models: leave one out")
    if arguments.model is not None and "size" in arguments.sweeps:
        parser.error("--sweeps size compares made-up models: leave out --model")
    return arguments


class Comparison:
    """All the measurements of one run.

    Args:
      arguments: The command line's.
      work: Folder for checkpoints and compiled programs.
    """

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self._arguments = arguments
        self._work = work
        self._rows: list[dict[str, Any]] = []
        self._failures: dict[str, str] = {}
        self._weights: dict[tuple[str, str], Path] = {}
        # Programs of this run only, so that its first start of a model is a cold one.
        self._programs = tempfile.TemporaryDirectory(prefix="jaxis-programs-")

    def run(self) -> dict[str, Any]:
        """The results, as JSON values."""
        model = self._arguments.shape if self._arguments.model is None else self._arguments.model.name
        loads = [(model, load) for load in LOADS]
        loads += [item for sweep in self._arguments.sweeps for item in SWEEPS[sweep]]
        limits = []
        with self._programs:
            for number in range(self._arguments.rounds):
                for model, load in dict.fromkeys(loads):
                    limits.append(measure_limits(self._arguments.threads).to_json())
                    for name in self._arguments.engines:
                        self._measure(number, model, load, name)
        return {
            "machine": describe_machine(),
            "model": str(self._arguments.model or f"{self._arguments.shape}, random weights"),
            "prefill_costs": {model: self._prefill_cost(model) for model in {model for model, _ in loads}},
            "threads": self._arguments.threads,
            "rounds": self._arguments.rounds,
            "engines": self._arguments.engines,
            "limits": limits,
            "rows": self._rows,
            "failures": self._failures,
        }

    def _measure(self, number: int, model: str, load: Load, name: str) -> None:
        """Adds a row, or a failure, for one engine on one load."""
        what = f"{name}, {model}, {load.batch_size} x {load.input_len} + {load.output_len}"
        if what in self._failures:
            return
        row: dict[str, Any] = {"round": number, "model": model, "engine": name, **dataclasses.asdict(load)}
        try:
            engine = ENGINES[name]
            weights = self._weights_of(model, engine)
            if number == 0 and engine.library == "jaxis":
                # It leaves compiled programs on disk; from here on its starts are warm.
                row["cold_start_seconds"] = self._start(engine, weights, load, start_only=True)["start_seconds"]
            row |= self._start(engine, weights, load, start_only=False)
        except (JaxisError, ImportError, OSError, RuntimeError) as error:
            self._failures[what] = " ".join(str(error).split())
            note(f"{what}: failed: {self._failures[what]}")
            return
        self._rows.append(row)
        note(f"round {number + 1}: {what}: {load.batch_size / row['step_seconds']:.1f} tokens/s")

    def _start(self, engine: Engine, weights: Path, load: Load, *, start_only: bool) -> dict[str, Any]:
        """What a worker process measured, and how long it took to its first token."""
        task = {
            "engine": engine.library,
            "model": str(weights),
            "arguments": engine.arguments | ({} if engine.library == "jaxis" else {"threads": self._arguments.threads}),
            "load": dataclasses.asdict(load),
            "start_only": start_only,
        }
        environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, str(self._arguments.threads)),
            "JAX_COMPILATION_CACHE_DIR": self._programs.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(task)]
        start = time.time()
        try:
            child = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=self._arguments.timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"took longer than {error.timeout:.0f} s") from None
        if child.returncode != 0:
            last_line = child.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(last_line or f"the process ended with {child.returncode}")
        measured = json.loads(child.stdout.strip().rpartition("\n")[2])
        return {"start_seconds": measured.pop("first_token_at") - start, **measured}

    def _weights_of(self, model: str, engine: Engine) -> Path:
        key = (model, engine.weights)
        if key not in self._weights:
            self._weights[key] = prepare_weights(self._checkpoint(model), engine.weights, self._work)
        return self._weights[key]

    def _prefill_cost(self, model: str) -> dict[str, int]:
        path = self._checkpoint(model)
        return dataclasses.asdict(prefill_cost(VllmConfig(ModelConfig(str(path), read_hf_config(path)))))

    def _checkpoint(self, model: str) -> Path:
        if self._arguments.model is not None:
            return self._arguments.model
        folder = self._work / model
        if not folder.exists():
            note(f"writing {model} with random weights")
            write_random_checkpoint(folder, SHAPES[model])
        return folder


def note(message: str) -> None:
    print(f"compare: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
