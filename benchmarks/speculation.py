"""Speculative decoding on and off, in turns in one process: text that is copied with edits, and text without matches.

    python benchmarks/random_checkpoint.py FOLDER
    python benchmarks/speculation.py FOLDER --quantization int8 --batch-size 1,4,16
    python benchmarks/speculation.py                   # of the embedded model

A model with random weights copies nothing. Its own greedy answer stands for the text to be copied: it is given as the
`prediction`, with one token in `--edit-every` replaced, so guesses come true as often as in edits of a file. It is
measured with and without in turns. Text without matches is drawn at temperature 1, and speculation switched on and off
every few steps, so that both have the same of what else the machine does. Each line has the medians of tokens a second,
the median of the ratios of neighbours in time and where half of the ratios are, the share of drafts that were right,
and by place; answers with and without are compared. A line below has the times of steps by their number of rows, from
which the engine chooses how many drafts there are. `--method default` is what an engine does that was told nothing: it
compiles steps with drafts once they would have saved the time; the others are measured with all of them compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from typing import Any

import numpy as np

from jaxis import LLM, SamplingParams
from jaxis.engine.drafting.speculation import Speculation
from jaxis.engine.output_processor import Request
from jaxis.engine.speculation import DraftCounts, NoSpeculation

BLOCK_STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--method", default="ngram", help="of speculative_config; default: none is given")
    parser.add_argument("--num-speculative-tokens", type=int, default=15)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--batch-size", default="1,16")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--edit-every", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(size) for size in options.batch_size.split(",")]
    with LLM(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        max_num_seqs=max(sizes),
        max_model_len=2 * (options.input_len + options.output_len),
        enable_prefix_caching=False,
        speculative_config=None
        if options.method == "default"
        else {"method": options.method, "num_speculative_tokens": options.num_speculative_tokens},
    ) as llm:
        for size in sizes:
            if options.method != "default":
                compile_all(llm, size, options.num_speculative_tokens)
            measure(llm, size, options)


def compile_all(llm: LLM, batch_size: int, max_drafts: int) -> None:
    """Waits until steps with drafts are compiled, of all sizes: until then there are none."""
    runner = llm.engine.runner
    most = min(batch_size * (1 + max_drafts), llm.engine.vllm_config.scheduler_config.max_num_batched_tokens)
    sizes = {runner.step_shape(num_tokens).num_tokens for num_tokens in range(batch_size + 1, most + 1)}
    for num_tokens in sizes:
        while not runner.can_draft(num_tokens):
            time.sleep(0.1)


def measure(llm: LLM, batch_size: int, options: argparse.Namespace) -> None:
    """Prints the lines of a batch size."""
    rng = np.random.default_rng(0)
    vocab_size = llm.engine.runner.vocab_size
    prompts = [{"prompt_token_ids": rng.integers(0, vocab_size, options.input_len).tolist()} for _ in range(batch_size)]
    greedy = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
    copies = []
    for answer in answers:
        edited = list(answer)
        for place in range(options.edit_every - 1, len(edited), options.edit_every):
            edited[place] = int(rng.integers(0, vocab_size))
        copies.append(dataclasses.replace(greedy, prediction=edited))
    compare(llm, "copying", prompts, copies, options.repeats, None)
    drawn = [dataclasses.replace(greedy, temperature=1.0, seed=i) for i in range(batch_size)]
    compare(llm, "no matches", prompts, drawn, options.repeats, BLOCK_STEPS)


# Tokens a second without and with speculation, in the order of time, and the answers of each run.
Rates = tuple[dict[bool, list[float]], list[list[list[int]]]]


def compare(
    llm: LLM, name: str, prompts: list[Any], params: list[SamplingParams], repeats: int, block_steps: int | None
) -> None:
    """Prints the line of a kind of text; see `measured`."""
    speculation = llm.engine.speculation
    assert isinstance(speculation, Speculation)
    measured(llm, prompts, params, 1, block_steps)  # compiles
    speculation.counts = DraftCounts()
    rates, answers = measured(llm, prompts, params, repeats, block_steps)
    off, on = (statistics.median(rates[is_on]) for is_on in (False, True))
    ratios = [with_drafts / without for without, with_drafts in zip(rates[False], rates[True], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    counts = speculation.counts
    share = counts.num_accepted_tokens / max(counts.num_draft_tokens, 1)
    places = [f"{right / max(counts.num_drafts, 1):.2f}" for right in counts.num_accepted_by_position[:8]]
    same = "equal answers" if all(answer == answers[0] for answer in answers) else "ANSWERS DIFFER"
    print(
        f"{name}, batch {len(prompts)}: {off:.1f} tok/s without, {on:.1f} with: {middle:.3f}x ({low:.3f} to "
        f"{high:.3f}; {len(ratios)} pairs); {share:.0%} of {counts.num_draft_tokens} drafts right, by place "
        f"{' '.join(places)}; {same}",
        flush=True,
    )
    times = ", ".join(
        f"{rows}: {1000 * seconds:.1f}" for (rows, _), seconds in sorted(speculation.chooser.step_seconds.items())
    )
    print(f"  milliseconds of a step, by rows: {times}", flush=True)


def measured(
    llm: LLM, prompts: list[Any], params: list[SamplingParams], repeats: int, block_steps: int | None
) -> Rates:
    """Rates of blocks of so many steps, of which a run has several, or of whole runs."""
    speculation = llm.engine.speculation
    assert isinstance(speculation, Speculation)

    def set_speculation(block: int) -> bool:
        is_on = block % 4 in (1, 2)  # neither is always first
        llm.engine.speculation = speculation if is_on else NoSpeculation()
        return is_on

    rates: dict[bool, list[float]] = {False: [], True: []}
    answers = []
    for turn in range(2 * repeats):
        first = 0 if block_steps else turn
        set_speculation(first)
        requests = begin(llm, prompts, params)
        outputs = [request.completions[0].sequence.output_token_ids for request in requests]
        for block in itertools.count(first):
            is_on = set_speculation(block)
            before, started = sum(map(len, outputs)), time.perf_counter()
            for _ in itertools.islice(itertools.count(), block_steps):
                if not llm.engine.has_unfinished:
                    break
                llm.engine.step()
            seconds = time.perf_counter() - started
            if block_steps is None or not any(request.finished for request in requests):
                rates[is_on].append((sum(map(len, outputs)) - before) / seconds)
            if not llm.engine.has_unfinished:
                break
        speculation.reset()
        answers.append([list(output) for output in outputs])
    llm.engine.speculation = speculation
    num_pairs = min(map(len, rates.values()))
    return {is_on: values[:num_pairs] for is_on, values in rates.items()}, answers


def begin(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Request]:
    """The requests, once all prompts were read."""
    requests = [
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], each)
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]
    while not all(request.completions[0].sequence.output_token_ids for request in requests):
        llm.engine.step()
    return requests


if __name__ == "__main__":
    main()
