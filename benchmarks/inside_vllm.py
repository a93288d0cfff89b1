"""vLLM with jaxis inside beside vLLM's own CPU backend, on the same weights, requests and cores, in one run.

    build/vllm/bin/python benchmarks/inside_vllm.py
    build/vllm/bin/python benchmarks/inside_vllm.py --engines jaxis-int8,vllm-bf16 --rounds 1 --work checkpoints

`make test-vllm` makes that environment. The weights are random, of the shape of Qwen3-0.6B, and stored as bfloat16.
Each engine is a process of its own, with an engine core in it; engines take turns, in one round forwards and in the
next backwards, so that what else the machine does falls on all of them. Prefill is one prompt of 256 tokens; decode is
what prompts of 16 tokens take longer for 16 tokens than for one. Memory is that of the process and its children at the
end, with pages that they share counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from random_checkpoint import SHAPES, write_random_checkpoint

SHAPE = "qwen3-0.6b"
ENGINES: dict[str, dict[str, Any]] = {
    "jaxis-int8": {"dtype": "float32", "additional_config": {"jaxis": {"quantization": "int8"}}},
    "jaxis-bf16": {"dtype": "float32"},  # weights stay as stored
    "vllm-bf16": {"dtype": "bfloat16"},
    "vllm-float32": {"dtype": "float32"},
}
MEASURED = {"prefill": "prefill, tok/s", "decode-1": "decode x1, tok/s", "decode-16": "decode x16, tok/s", "gib": "GiB"}
PROCESS = """
import json, sys, time
import numpy as np, psutil
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, arguments, vocab_size = json.loads(sys.argv[1])
    llm = LLM(
        model, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False, **arguments,
    )
    rng = np.random.default_rng(0)

    def seconds(size, prompt_len, num_tokens):
        prompts = [{"prompt_token_ids": ids} for ids in rng.integers(0, vocab_size, (size, prompt_len)).tolist()]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(1, 256, 1)  # warms up, as the other first calls do
    found = {"prefill": 256 / seconds(1, 256, 1)}
    for size in (1, 16):
        seconds(size, 16, 3)
        found[f"decode-{size}"] = size * 15 / (seconds(size, 16, 16) - seconds(size, 16, 1))
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found["gib"] = sum(each.memory_full_info().pss for each in processes) / 2**30
    print("MEASURED" + json.dumps(found), flush=True)
"""


def measure(engine: str, checkpoint: Path) -> dict[str, float]:
    """What a fresh process of an engine measures, by the names of MEASURED.

    Raises:
      SystemExit: It fails.
    """
    environment = os.environ | {
        "VLLM_PLUGINS": "jaxis" if engine.startswith("jaxis") else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # of vLLM's own: all cores compute
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # what it keeps of vLLM 0.32 cannot be loaded again: it would compile each time
    }
    settings = json.dumps([str(checkpoint), ENGINES[engine], SHAPES[SHAPE]["vocab_size"]])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "process.py"  # vLLM's own worker is a process that imports it again
        script.write_text(PROCESS)
        run = subprocess.run([sys.executable, script, settings], env=environment, capture_output=True, text=True)
    lines = [line.removeprefix("MEASURED") for line in run.stdout.splitlines() if line.startswith("MEASURED")]
    if run.returncode or len(lines) != 1:
        raise SystemExit(f"{engine} failed:\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}")
    return json.loads(lines[0])


def main() -> None:
    """Prints what each round measured, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--work", type=Path, help="folder that keeps the checkpoint for the next run")
    options = parser.parse_args()
    engines = options.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"--engines: {', '.join(unknown)} is none of {', '.join(ENGINES)}")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = (options.work or Path(scratch)) / SHAPE
        if not checkpoint.exists():
            write_random_checkpoint(checkpoint, SHAPES[SHAPE])
        found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
        for index in range(options.rounds):
            for engine in engines if index % 2 == 0 else reversed(engines):
                found[engine].append(measure(engine, checkpoint))
                print(f"round {index + 1}, {engine}: {_shown(found[engine][-1])}", flush=True)
    for engine, rounds in found.items():
        medians = {name: statistics.median(each[name] for each in rounds) for name in MEASURED}
        print(f"{engine + ':':<14}{_shown(medians)}")


def _shown(values: dict[str, float]) -> str:
    return "   ".join(f"{label} {values[name]:.2f}" for name, label in MEASURED.items())


if __name__ == "__main__":
    main()
