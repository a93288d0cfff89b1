"""Measures the engine on this machine: start to first token, prefill, decode, memory.

    python benchmarks/engine.py
    python benchmarks/engine.py --model ./Qwen3-0.6B --prompt-len 1024 --batch 8 --output-len 64

Without --model, a checkpoint of Qwen3-0.6B's shape with random weights is made in a temporary folder: the speed of a
model does not depend on its weights. Each start is a process of its own. "Cold" finds no compiled programs on disk,
"warm" those that the cold start left; the checkpoint's files are in the page cache for both, as far as memory allows.

Decoding reads every weight once a step and the keys and values of the context. The time that takes at the speed of a
plain copy, measured here too, is the limit that the decode figure is set against.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPEATS = 3
COPY_BYTES = 256 << 20
COPY_REPEATS = 10
SEED = 0
MODES = ("start", "all")


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="jaxis-bench-") as scratch:
        if arguments.model is None:
            from random_checkpoint import QWEN3_0_6B, write_random_checkpoint

            note("writing a checkpoint of Qwen3-0.6B's shape with random weights")
            arguments.model = str(Path(scratch, "Qwen3-0.6B-random"))
            write_random_checkpoint(Path(arguments.model), QWEN3_0_6B, seed=SEED)
        programs = Path(scratch, "programs")
        note("cold start")
        cold = run_child(arguments, "start", programs)
        note("warm start, prefill, decode")
        warm = run_child(arguments, "all", programs)
    report = {
        "model": Path(arguments.model).name,
        "prompt_len": arguments.prompt_len,
        "batch": arguments.batch,
        "output_len": arguments.output_len,
        "start_to_first_token_cold_seconds": cold.pop("start_to_first_token_seconds"),
        "start_to_first_token_warm_seconds": warm.pop("start_to_first_token_seconds"),
        **warm,
    }
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--model", help="checkpoint folder or hub id (default: Qwen3-0.6B's shape, random weights)")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="requests at once (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate a request (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.prompt_len, arguments.batch) < 1 or arguments.output_len < 2:
        parser.error("--prompt-len and --batch must be at least 1, --output-len at least 2")
    return arguments


def run_child(arguments: argparse.Namespace, mode: str, programs: Path) -> dict[str, Any]:
    """Runs this script in a new process; its start counts from here."""
    command = [sys.executable, __file__, "--measure", mode, "--model", arguments.model]
    for name in ("prompt_len", "batch", "output_len"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    start = time.time()
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(programs)}
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode != 0:
        sys.exit(child.returncode)
    measured = json.loads(child.stdout)
    measured["start_to_first_token_seconds"] = measured.pop("first_token_at") - start
    return measured


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a child process measures, in seconds, bytes and tokens."""
    import jax

    from jaxis.engine.setup import EngineArgs, build_engine
    from jaxis.errors import JaxisError
    from jaxis.progress import ProgressDisplay

    # The cold start leaves its programs for the warm one, those that compile quickly too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    try:
        engine = build_engine(
            EngineArgs(
                model=arguments.model,
                max_model_len=arguments.prompt_len + arguments.output_len,
                max_num_seqs=arguments.batch,
                enable_prefix_caching=False,
            ),
            ProgressDisplay(enabled=False),
        ).engine
        first_token_at = run_batch(engine, 1, arguments.prompt_len, 1)[0]
        if arguments.measure == "start":
            return {"first_token_at": first_token_at}
        return {"first_token_at": first_token_at, **measure_speed(engine, arguments), **describe(engine)}
    except JaxisError as error:
        sys.exit(f"benchmark: error: {error}")


def run_batch(engine: Any, batch: int, prompt_len: int, output_len: int) -> list[float]:
    """Runs `batch` requests of random tokens to their end; returns the wall-clock time at which each step's tokens
    were known to all, beginning with the first step after which every request has a token."""
    import numpy as np

    from jaxis.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    prompts = np.random.default_rng(SEED).integers(0, engine.runner.vocab_size, (batch, prompt_len)).tolist()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    started: set[str] = set()
    times = []
    num_finished = 0
    while num_finished < batch:
        for state in engine.step():
            started.add(state.request_id)
            num_finished += state.finished
        if len(started) == batch and num_finished in (0, batch):
            times.append(time.time())
    return times


def measure_speed(engine: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefill from runs that end with the first token, decode from the steps in which every request decodes."""
    shape = arguments.batch, arguments.prompt_len
    run_batch(engine, *shape, arguments.output_len)  # compiles what is left to compile
    prefill_seconds, step_seconds = [], []
    for _ in range(REPEATS):
        start = time.time()
        prefill_seconds.append(run_batch(engine, *shape, 1)[0] - start)
        times = run_batch(engine, *shape, arguments.output_len)
        step_seconds += [after - before for before, after in itertools.pairwise(times)]
    prefill, step = statistics.median(prefill_seconds), statistics.median(step_seconds)
    bandwidth = copy_bandwidth()
    step_bytes = decode_bytes(engine, arguments)
    return {
        "prefill_tokens_per_second": arguments.batch * arguments.prompt_len / prefill,
        "decode_tokens_per_second": arguments.batch / step,
        "decode_step_seconds": step,
        "decode_step_bytes": step_bytes,
        "copy_bytes_per_second": bandwidth,
        "decode_share_of_copy_bandwidth": step_bytes / bandwidth / step,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def copy_bandwidth() -> float:
    """Bytes a second that the device reads and writes together in a plain copy."""
    import jax
    import jax.numpy as jnp

    # In place: fresh memory would first have to be mapped, page by page.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = add(jnp.zeros(COPY_BYTES // 4, jnp.float32))
    seconds = []
    for _ in range(COPY_REPEATS):
        array.block_until_ready()
        start = time.perf_counter()
        array = add(array).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / min(seconds)


def decode_bytes(engine: Any, arguments: argparse.Namespace) -> int:
    """Bytes that a decode step has to read: the weights, and the context of half-way through the output."""
    from flax import nnx

    from jaxis.engine.kv_cache import block_bytes, kv_cache_specs
    from jaxis.loading.model_loader import construct_model
    from jaxis.models.registry import get_model_class

    config = engine.vllm_config
    hf_config = config.model_config.hf_config
    model_class = get_model_class(list(hf_config["architectures"]))
    model = nnx.eval_shape(lambda: construct_model(model_class, config))
    is_tied = hf_config.get("tie_word_embeddings", False)
    # Of an embedding table that is not the output head too, a step reads a few rows only.
    weights = sum(
        param.get_value().size * param.get_value().dtype.itemsize
        for name, param in model.named_parameters()
        if is_tied or not name.endswith("embed_tokens.weight")
    )
    cache_dtype = config.cache_config.cache_dtype or config.model_config.dtype
    context = arguments.prompt_len + arguments.output_len // 2
    return weights + arguments.batch * context * block_bytes(kv_cache_specs(model, config), 1, cache_dtype)


def peak_memory_bytes() -> int:
    """The accelerator's peak, or on CPU this process's peak of resident memory."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def describe(engine: Any) -> dict[str, Any]:
    import jax
    import numpy as np

    import jaxis

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "dtype": np.dtype(engine.vllm_config.model_config.dtype).name,
        "device": jax.local_devices()[0].device_kind,
        "cores": usable,
        "machine": platform.platform(),
        "jaxis": jaxis.__version__,
        "jax": jax.__version__,
    }


def as_text(report: dict[str, Any]) -> str:
    gigabyte = 1e9
    lines = {
        "model": f"{report['model']}, {report['dtype']}",
        "machine": f"{report['device']}, {report['cores']} cores, {report['machine']}, jax {report['jax']}",
        "load": f"{report['batch']} x ({report['prompt_len']} prompt + {report['output_len']} output tokens), greedy",
        "start to first token": f"{report['start_to_first_token_cold_seconds']:.2f} s cold, "
        f"{report['start_to_first_token_warm_seconds']:.2f} s warm",
        "prefill": f"{report['prefill_tokens_per_second']:.1f} tokens/s",
        "decode": f"{report['decode_tokens_per_second']:.1f} tokens/s "
        f"({1000 * report['decode_step_seconds']:.1f} ms a step)",
        "decode reads": f"{report['decode_step_bytes'] / gigabyte:.2f} GB a step, "
        f"{100 * report['decode_share_of_copy_bandwidth']:.0f}% of the copy's speed",
        "memory copy": f"{report['copy_bytes_per_second'] / gigabyte:.1f} GB/s read and written",
        "peak memory": f"{report['peak_memory_bytes'] / gigabyte:.2f} GB",
    }
    return "\n".join(f"{name + ':':<22}{text}" for name, text in lines.items())


def note(message: str) -> None:
    print(f"benchmark: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
