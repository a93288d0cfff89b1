"""Compares jaxis with transformers, llama.cpp and ik_llama.cpp on the same weights and cores, in turn, in one run.

    python benchmarks/compare.py --out results --ik-llama-cpp ik_llama.cpp/build/bin
    python benchmarks/compare.py --threads 2 --engines jaxis-int8,llama.cpp-q8_0 --rounds 5
    python benchmarks/compare.py --loads '' --sweeps context,batch,size --rounds 1 --out results-sweeps
    python benchmarks/compare.py --shape qwen3-moe-1.5b --engines jaxis-bf16,transformers-bf16 --out results
    python benchmarks/compare.py --shape deepseek-v2-1.7b --engines jaxis-bf16,transformers-bf16 --out results
    python benchmarks/compare.py --engines jaxis-q4_k_m.gguf,llama.cpp-q4_k_m --out results
    python benchmarks/compare.py --model model.gguf --out results
    python benchmarks/compare.py --baseline ../jaxis-before --engines jaxis-int8,baseline:jaxis-int8 --out results

Without --model, checkpoints of Qwen3's shapes with random weights are made: speed does not depend on the weights. In
each round, each engine runs the loads in a process of its own, one after the other. Engines take turns, in one round
forwards and in the next backwards, so that what else the machine does falls on all of them. Each round also measures
the machine's limits, beside which the figures stand.

The folder --out gets results.json, results.md and the plots of the sweeps. `report.py` makes them again from the JSON,
also of a run that was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import BASELINE, DEFAULT_ENGINES, DEFAULT_GGUF_ENGINES, ENGINES, Engine, engine_of, prepare_weights
from jaxis.bench.cost import PrefillCost, prefill_cost
from jaxis.bench.limits import measure_limits
from jaxis.bench.process_facts import describe_machine
from jaxis.config import ModelConfig, VllmConfig
from jaxis.errors import JaxisError
from jaxis.host.cores import usable_cores
from jaxis.kernels import native
from jaxis.loading.open_checkpoint import read_hf_config
from loads import LOADS, SWEEPS, YARDSTICK, Group, groups
from random_checkpoint import SHAPES, write_random_checkpoint
from report import write_report

# Whichever of them an engine's libraries read.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = {"llama.cpp": ("llama-cpp-python",), "transformers": ("transformers", "torch")}


def main() -> None:
    arguments = parse_arguments()
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.sched_setaffinity(0, cores)  # what is started from here inherits it
    with tempfile.TemporaryDirectory(prefix="jaxis-compare-") as scratch:
        comparison = Comparison(arguments, arguments.work or Path(scratch))
        arguments.out.mkdir(parents=True, exist_ok=True)
        results = comparison.run()
    print(write_report(results, arguments.out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: random weights of --shape)")
    parser.add_argument("--shape", choices=SHAPES, default=YARDSTICK, help="of made-up weights (default: %(default)s)")
    default = f"{','.join(DEFAULT_ENGINES)}; of a GGUF file: {','.join(DEFAULT_GGUF_ENGINES)}"
    parser.add_argument("--engines", help=f"any of {', '.join(ENGINES)} (default: {default})")
    parser.add_argument("--loads", default=",".join(LOADS), help="of the tables (default: %(default)s; '' for none)")
    parser.add_argument("--sweeps", default="", help=f"further loads, of {','.join(SWEEPS)} (default: none)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="cores for each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is measured (default: %(default)s)")
    parser.add_argument("--ik-llama-cpp", type=Path, help="folder of ik_llama.cpp's tools (default: $IK_LLAMA_CPP)")
    parser.add_argument(
        "--baseline",
        type=Path,
        help="another checkout of jaxis with its .venv, for engines such as baseline:jaxis-int8",
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder that keeps checkpoints for the next run (default: temporary)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.engines is None:
        is_gguf = arguments.model is not None and arguments.model.is_file()
        arguments.engines = ",".join(DEFAULT_GGUF_ENGINES if is_gguf else DEFAULT_ENGINES)
    if arguments.ik_llama_cpp is None and "IK_LLAMA_CPP" in os.environ:
        arguments.ik_llama_cpp = Path(os.environ["IK_LLAMA_CPP"])
    for option in ("engines", "loads", "sweeps"):
        setattr(arguments, option, [name for name in getattr(arguments, option).split(",") if name])
    if problem := _problem(arguments):
        parser.error(problem)
    return arguments


def _problem(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, if anything is."""
    if problem := _unknown_name(arguments):
        return problem
    if not arguments.loads and not arguments.sweeps:
        return "--loads and --sweeps are both empty: nothing to measure"
    if not 1 <= arguments.threads <= usable_cores():
        return f"--threads must be 1 to {usable_cores()}, the cores that this process may use"
    if arguments.rounds < 1:
        return "--rounds must be at least 1"
    if arguments.model is not None and arguments.shape != YARDSTICK:
        return "--model and --shape name two models: leave one out"
    if arguments.model is not None and "size" in arguments.sweeps:
        return "--sweeps size compares made-up models: leave out --model"
    return None


def _unknown_name(arguments: argparse.Namespace) -> str | None:
    if not arguments.engines:
        return "--engines is empty: nothing to measure"
    for option, known in (("loads", LOADS), ("sweeps", SWEEPS)):
        if unknown := [name for name in getattr(arguments, option) if name not in known]:
            return f"--{option}: {', '.join(unknown)}: known are {', '.join(known)}"
    for name in arguments.engines:
        try:
            is_baseline = engine_of(name).library == BASELINE
        except KeyError:
            return f"--engines: {name}: known are {', '.join(ENGINES)}, and {BASELINE}: before those of jaxis"
        if is_baseline and arguments.baseline is None:
            return f"--engines: {name} is the engine of another checkout: give its folder with --baseline"
    return None


class Comparison:
    """All the measurements of one run.

    Args:
      arguments: The command line's.
      work: Folder for checkpoints and compiled programs.
    """

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self._arguments = arguments
        self._work = work
        model = arguments.shape if arguments.model is None else arguments.model.name
        self._groups = groups(model, arguments.loads, arguments.sweeps)
        self._limits: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._failures: dict[str, str] = {}
        self._weights: dict[tuple[str, str], Path] = {}
        # Programs of this run only, so that its first start of a model is a cold one.
        self._programs = tempfile.TemporaryDirectory(prefix="jaxis-programs-")

    def run(self) -> dict[str, Any]:
        """The results, as JSON values. What there is of them is kept in results.json, should the run be stopped."""
        engines = self._arguments.engines
        facts = self._facts()
        with self._programs:
            for number in range(self._arguments.rounds):
                for group in self._groups:
                    self._limits.append(measure_limits(self._arguments.threads).to_json())
                    for name in engines if number % 2 == 0 else reversed(engines):
                        self._measure(number, group, name)
                        results = facts | self._measured(number + 1)
                        (self._arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        return results

    def _measured(self, num_rounds: int) -> dict[str, Any]:
        return {
            "rounds": num_rounds,
            "limits": self._limits,
            "rows": self._rows,
            "starts": self._starts,
            "failures": self._failures,
        }

    def _facts(self) -> dict[str, Any]:
        """What was measured where, with what."""
        return {
            "machine": describe_machine() | {"native_kernels": native.status()},
            "versions": self._versions(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "model": str(self._arguments.model or f"{self._arguments.shape}, random weights"),
            "prefill_costs": {model: dataclasses.asdict(self._prefill_cost(model)) for model in self._models()},
            "threads": self._arguments.threads,
            "engines": self._arguments.engines,
        }

    def _measure(self, number: int, group: Group, name: str) -> None:
        """Adds rows, or a failure, of one engine on the loads of a group."""
        what = f"{name}, {group.model}, {group.name}"
        if what in self._failures:
            return
        key = {"round": number, "group": group.name, "model": group.model, "engine": name}
        start: dict[str, Any] = {}
        try:
            engine = engine_of(name)
            weights = self._weights_of(group.model, engine)
            if number == 0 and engine.library == "jaxis":
                # It leaves compiled programs on disk; from here on its starts are warm.
                start["cold_start_seconds"] = self._start(engine, weights, group, start_only=True)["start_seconds"]
            began = time.monotonic()
            start |= self._start(engine, weights, group, start_only=False)
        except (JaxisError, ImportError, OSError, RuntimeError) as error:
            self._failures[what] = " ".join(str(error).split())
            note(f"{what}: failed: {self._failures[what]}")
            return
        rows = start.pop("loads")
        self._rows += [key | row for row in rows]
        self._starts.append(key | start)
        speeds = ", ".join(
            f"{row['batch_size']} x {row['input_len']}: "
            f"{row['batch_size'] * row['input_len'] / row['prefill_seconds']:.0f}, "
            f"{row['batch_size'] / row['step_seconds']:.1f}"
            for row in rows
        )
        seconds = time.monotonic() - began
        note(f"round {number + 1}: {what}: prefill and decode tokens/s: {speeds} ({seconds:.0f} s)")

    def _start(self, engine: Engine, weights: Path, group: Group, *, start_only: bool) -> dict[str, Any]:
        """What a worker process measured, and how long it took to its first token."""
        is_jaxis = engine.library in ("jaxis", BASELINE)
        own = {} if is_jaxis else {"threads": self._arguments.threads}
        if engine.library == "ik_llama.cpp":
            folder = self._arguments.ik_llama_cpp
            own["binaries"] = None if folder is None else str(folder)
        task = {
            "engine": "jaxis" if is_jaxis else engine.library,
            "model": str(weights.resolve()),
            "arguments": engine.arguments | own,
            "loads": [dataclasses.asdict(load) for load in group.loads],
            "start_only": start_only,
        }
        programs = Path(self._programs.name, engine.library)  # those of another tree are not this one's
        environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, str(self._arguments.threads)),
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        python = sys.executable
        if engine.library == BASELINE:
            python = str(self._arguments.baseline.absolute() / ".venv" / "bin" / "python")
        command = [python, str(Path(__file__).with_name("worker.py")), json.dumps(task)]
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

    def _models(self) -> list[str]:
        return list(dict.fromkeys(group.model for group in self._groups))

    def _versions(self) -> dict[str, str]:
        """Of the peers that were measured, as far as they tell."""
        libraries = {engine_of(name).library for name in self._arguments.engines}
        versions = {}
        for package in (package for library in libraries for package in PACKAGES.get(library, ())):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        return versions

    def _weights_of(self, model: str, engine: Engine) -> Path:
        key = (model, engine.weights)
        if key not in self._weights:
            self._weights[key] = prepare_weights(self._checkpoint(model), engine.weights, self._work)
        return self._weights[key]

    def _prefill_cost(self, model: str) -> PrefillCost:
        path = self._checkpoint(model)
        return prefill_cost(VllmConfig(ModelConfig(str(path), read_hf_config(path))))

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
