"""Compares two hosts with a pipeline stage each, processes with one core each, with one process on one core.

python benchmarks/pipeline_hosts.py FOLDER
python benchmarks/pipeline_hosts.py FOLDER --requests 2 32 --turns 3

Writes a model with random weights into FOLDER unless there is one. Each of the three processes is pinned to a core, the
one process to that of the first host; they take turns. The share of the time in which a process used its core is what
its stage did not wait.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

import psutil

NUM_TOKENS = 64
# Two stages of about as much work: the last one has the head, and one layer less.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_hidden_layers": 13,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def work(folder: str, num_hosts: int, port: int) -> None:
    """Has a model; for each line of input, a number of requests, answers them and prints how long that took."""
    from jaxis import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = LLM(
        folder,
        nnodes=num_hosts,
        pipeline_parallel_size=num_hosts,
        master_port=port,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        max_model_len=256,
        kv_cache_memory="256MiB",
        enable_prefix_caching=False,
        show_progress=False,
    )
    with llm:
        print("ready", flush=True)
        for line in sys.stdin:
            rng = random.Random(0)
            prompts = [[rng.randrange(8192) for _ in range(8)] for _ in range(int(line))]
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - started
            tokens = [output.outputs[0].token_ids for output in outputs]
            print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


class Worker:
    """A process that has the model, and those that follow it.

    Args:
      folder: The model's.
      num_hosts: Processes; each has the core of its number.
    """

    def __init__(self, folder: Path, num_hosts: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        own = [sys.executable, __file__, str(folder), "--work", str(num_hosts), port]
        self._leader = subprocess.Popen(
            ["taskset", "-c", "0", *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._processes = [self._leader]
        serve = [sys.executable, "-c", "from jaxis.cli.main import main; main()", "serve", "--headless"]
        for rank in range(1, num_hosts):
            place = ["--nnodes", str(num_hosts), "--node-rank", str(rank), "--master-port", port]
            self._processes.append(subprocess.Popen(["taskset", "-c", str(rank), *serve, *place]))
        while (line := cast("IO[str]", self._leader.stdout).readline().strip()) != "ready":
            if self._leader.poll() is not None:
                raise SystemExit(f"the model did not start: {line}")

    def run(self, num_requests: int) -> dict[str, Any]:
        """Answers requests: seconds, tokens, and the share of the time in which each process computed."""
        before = [self._cpu_seconds(process) for process in self._processes]
        cast("IO[str]", self._leader.stdin).write(f"{num_requests}\n")
        cast("IO[str]", self._leader.stdin).flush()
        found = json.loads(cast("IO[str]", self._leader.stdout).readline())
        after = [self._cpu_seconds(process) for process in self._processes]
        found["busy"] = [(b - a) / found["seconds"] for a, b in zip(before, after, strict=True)]
        return found

    def close(self) -> None:
        """Ends it."""
        cast("IO[str]", self._leader.stdin).close()
        for process in self._processes:
            process.wait(60)

    @staticmethod
    def _cpu_seconds(process: subprocess.Popen[str]) -> float:
        times = psutil.Process(process.pid).cpu_times()
        return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[2, 8, 32], help="default: 2 8 32")
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(str(arguments.folder), *map(int, arguments.work))
        return
    if not arguments.folder.exists():
        from random_checkpoint import write_random_checkpoint

        write_random_checkpoint(arguments.folder, CONFIG)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    workers = {"one process": Worker(arguments.folder, 1), "two hosts": Worker(arguments.folder, 2)}
    for num_requests in arguments.requests:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for turn in range(arguments.turns + 1):
            for name, worker in workers.items():
                result = worker.run(num_requests)
                if turn:  # the first one compiles
                    results[name].append(result)
        assert all(
            result["tokens"] == results["one process"][0]["tokens"] for each in results.values() for result in each
        )
        for name, each in results.items():
            rates = [num_requests * NUM_TOKENS / result["seconds"] for result in each]
            busy = [
                f"{100 * statistics.median(shares):.0f}%" for shares in zip(*(r["busy"] for r in each), strict=True)
            ]
            print(
                f"{num_requests:3} requests, {name:11}: {statistics.median(rates):7.1f} tokens/s "
                f"({min(rates):.1f} to {max(rates):.1f}); cores busy {', '.join(busy)}"
            )
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
