"""How long a running engine takes to get other weights: all of them from memory, or an adapter from its folder.

python benchmarks/weight_updates.py [MODEL] [--adapter FOLDER FOLDER]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import psutil

from jaxis import LLM, LoRARequest, SamplingParams
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.loading.open_checkpoint import open_checkpoint

REPEATS = 5


def main() -> None:
    """Measures, and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(EMBEDDED_MODEL))
    parser.add_argument("--adapter", nargs=2, metavar="FOLDER", default=())
    arguments = parser.parse_args()
    with open_checkpoint(arguments.model) as checkpoint:
        weights = {name: np.array(tensor) for name, tensor in checkpoint.iterate()}
    size = sum(array.nbytes for array in weights.values())
    lora = {"enable_lora": True, "max_loras": 1} if arguments.adapter else {}
    llm = LLM(arguments.model, show_progress=False, max_model_len=512, kv_cache_memory="64MiB", **lora)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    llm.generate([[1, 2, 3]], params)
    llm.update_weights(weights)
    before, seconds = psutil.Process().memory_info().rss, []
    for _ in range(REPEATS):
        started = time.perf_counter()
        llm.update_weights(weights)
        seconds.append(time.perf_counter() - started)
    grown = psutil.Process().memory_info().rss / before - 1
    started = time.perf_counter()
    copies = [array.copy() for array in weights.values()]
    copied = time.perf_counter() - started
    del copies
    print(f"all weights: {size / 1e6:.0f} MB in {1e3 * min(seconds):.0f} ms, a copy of them {1e3 * copied:.0f} ms")
    print(f"memory of the process after {REPEATS} more updates: {100 * grown:+.1f}%")
    shared = llm.engine.runner.model
    started = time.perf_counter()
    llm.update_weights(shared)
    print(f"the same arrays, not copied: {1e3 * (time.perf_counter() - started):.1f} ms")
    if arguments.adapter:
        seconds = []
        for number in range(2 * REPEATS):
            request = LoRARequest("adapter", 1, arguments.adapter[number % 2])
            llm.generate([[1, 2, 3]], params, lora_request=request)
            started = time.perf_counter()
            llm.generate([[1, 2, 3]], params, lora_request=request)
            plain = time.perf_counter() - started
            other = LoRARequest("adapter", 1, arguments.adapter[(number + 1) % 2])
            started = time.perf_counter()
            llm.generate([[1, 2, 3]], params, lora_request=other)
            seconds.append(time.perf_counter() - started - plain)
        print(
            f"another adapter: {1e3 * sorted(seconds)[len(seconds) // 2]:.1f} ms more than a request with the last one"
        )


if __name__ == "__main__":
    main()
