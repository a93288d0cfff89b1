"""What adapters by request cost: steps and prefills with some in the batch beside those of the base, loads, and memory.

    python benchmarks/random_checkpoint.py FOLDER
    python benchmarks/adapters.py FOLDER [--quantization int8] [--modules q_proj,v_proj] [--rank 8 --max-lora-rank 64]

Adapters are random and in bfloat16. Numbers of adapters take turns, so that a slow minute of the machine is slow for
all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from jaxis import LLM, LoRARequest, SamplingParams
from jaxis.loading.open_checkpoint import TensorListing

ALL_LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def write_adapter(base: Path, folder: Path, modules: list[str], rank: int, seed: int) -> int:
    """Writes an adapter of a checkpoint; returns the bytes of its file."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, info in TensorListing(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            size_out, size_in = info.shape
            for part, shape in (("A", (rank, size_in)), ("B", (size_out, rank))):
                values = rng.standard_normal(shape, np.float32) * 0.02
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return (folder / "adapter_model.safetensors").stat().st_size


def requests(adapters: list[LoRARequest], number: int, size: int) -> list[LoRARequest | None]:
    """That of each request of a batch: so many adapters in turns, or none."""
    return [adapters[i % number] if number else None for i in range(size)]


def run(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None], num_tokens: int) -> float:
    """Seconds of an answer to all."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, greedy, lora_request=adapters, progress=False)
    return time.perf_counter() - start


def main() -> None:
    """Measures, and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--modules", default=ALL_LINEAR)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--adapters", default="0,1,4,16", help="Numbers of adapters in a batch.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompt-len", type=int, default=512, help="Of the prompt of a prefill; 0: no prefill.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    numbers = [int(number) for number in options.adapters.split(",")]
    size = options.batch_size
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / f"a{i}" for i in range(max(numbers) + 1)]
        modules = options.modules.split(",")
        for i, folder in enumerate(folders):
            nbytes = write_adapter(options.checkpoint, folder, modules, options.rank, i)
        adapters = [LoRARequest(folder.name, 1, folder) for folder in folders]
        with LLM(
            options.checkpoint,
            quantization=options.quantization,
            enable_lora=True,
            max_loras=max(numbers),
            max_lora_rank=options.max_lora_rank,
            max_num_seqs=size,
            max_model_len=1024,
            enable_prefix_caching=False,
            speculative_config={"num_speculative_tokens": 0},
        ) as llm:
            vocab_size = llm.engine.runner.vocab_size
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, vocab_size, 4).tolist() for _ in range(size)]
            measure_steps(llm, prompts, adapters, numbers, options)
            if options.prompt_len:
                prompt = [rng.integers(0, vocab_size, options.prompt_len).tolist()]
                measure_prefill(llm, prompt, adapters, options)
            measure_loads(llm, folders, nbytes)


def measure_steps(
    llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest], numbers: list[int], options: argparse.Namespace
) -> None:
    """Milliseconds of a decode step: what an answer takes longer by having more tokens."""
    short, long = 2, 2 + options.steps
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for turn, number in itertools.product(range(options.rounds + 1), numbers):
        chosen = requests(adapters, number, len(prompts))
        seconds = [run(llm, prompts, chosen, num_tokens) for num_tokens in (short, long)]
        if turn:  # the first compiles
            times[number].append((seconds[1] - seconds[0]) / options.steps)
    base = statistics.median(times[numbers[0]])
    for number in numbers:
        middle = statistics.median(times[number])
        spread = f"{min(times[number]) * 1e3:.1f} to {max(times[number]) * 1e3:.1f}"
        print(
            f"step of {len(prompts)} requests, {number} adapters: {middle * 1e3:.1f} ms ({spread}), "
            f"{middle / base - 1:+.0%} beside {numbers[0]}",
            flush=True,
        )


def measure_prefill(
    llm: LLM, prompt: list[list[int]], adapters: list[LoRARequest], options: argparse.Namespace
) -> None:
    """Seconds of a prompt alone, with an adapter and without."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn, has_adapter in itertools.product(range(options.rounds + 1), times):
        seconds = run(llm, prompt, [adapters[0] if has_adapter else None], 1)
        if turn:
            times[has_adapter].append(seconds)
    base, changed = (statistics.median(each) for each in times.values())
    print(
        f"prefill of {len(prompt[0])} tokens: {base:.2f} s, with an adapter {changed:.2f} s, {changed / base - 1:+.0%}"
    )


def measure_loads(llm: LLM, folders: list[Path], nbytes: int) -> None:
    """Milliseconds of reading an adapter, and of putting one that is known into the place of another."""
    variants = llm.engine.runner.variants
    assert variants is not None
    reads, moves = [], []
    for folder in folders:
        start = time.perf_counter()
        read = variants.read(str(folder))
        reads.append(time.perf_counter() - start)
        digest = variants.add(read, keep=False)
        start = time.perf_counter()
        variants.take(digest)
        jax.block_until_ready(variants.arrays)
        moves.append(time.perf_counter() - start)
        variants.give_back(digest)
    print(f"an adapter: a file of {nbytes / 1e6:.1f} MB, read in {statistics.median(reads) * 1e3:.0f} ms")
    # All but one have a place already.
    print(f"a known adapter takes another's place in {max(moves) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
