"""What layers that were trained to draft gain: acceptance, and speed with and without, in turns in one process.

    python benchmarks/train_draft_pair.py FOLDER
    python benchmarks/draft_gain.py FOLDER
    python benchmarks/draft_gain.py FOLDER/large --dtype bfloat16 --no-reference

The prompts are held-out text. For each method, temperature and number of drafts, a line has how often the first, the
second, ... draft was right (of the steps that drafted), tokens a step, and the ratio of tokens a second to those
without: with all drafts computed always, and with as many as the engine chooses. Answers and their log-probabilities
are compared bit for bit. Drafts are compared with those of transformers' own layer, and of the module that the head was
trained as.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from draft_pair.reference import reference_drafter
from draft_pair.text import read_text, tokenize
from jaxis import LLM, SamplingParams
from jaxis.engine.drafting.chooser import DraftChooser, Guessed
from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.drafting.speculation import DraftRequest, Speculation

NUM_COMPARED = 48  # drafts, of each method, with the reference's


class AllDrafts(DraftChooser):
    """As many drafts as may be, whatever they cost."""

    def __init__(self) -> None:
        super().__init__(int, lambda *_: True, 1 << 20)

    def choose(self, sequences: Sequence[Guessed], num_running: int) -> list[int]:
        del num_running
        return [each.max_drafts for each in sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default="mtp,eagle3")
    parser.add_argument("--num-speculative-tokens", default="1,2,3,4")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--no-reference", action="store_true")
    options = parser.parse_args()
    tokens = tokenize(Tokenizer.from_file(str(options.folder / "model/tokenizer.json")), read_text()[1])
    starts = np.random.default_rng(0).integers(0, len(tokens) - options.input_len, options.num_prompts)
    prompts = [{"prompt_token_ids": tokens[start : start + options.input_len].tolist()} for start in starts]
    with load(options, {"num_speculative_tokens": 0}) as plain:  # without n-gram lookup too
        for method in options.methods.split(","):
            for num_drafts in map(int, options.num_speculative_tokens.split(",")):
                config = {"method": method, "num_speculative_tokens": num_drafts}
                if method == "eagle3":
                    config["model"] = str(options.folder / "eagle3")
                with load(options, config) as llm:
                    for temperature in (0.0, 1.0):
                        compare(plain, llm, method, num_drafts, prompts, temperature, options)
                    if not options.no_reference:
                        compare_with_reference(llm, method, prompts, num_drafts, options)


@contextlib.contextmanager
def load(options: argparse.Namespace, speculative_config: dict[str, Any]) -> Iterator[LLM]:
    """The model, for one request at a time."""
    with LLM(
        str(options.folder / "model"),
        dtype=options.dtype,
        quantization=options.quantization,
        max_num_seqs=1,
        max_model_len=2 * (options.input_len + options.output_len),
        enable_prefix_caching=False,
        kv_cache_memory="256MiB",
        speculative_config=speculative_config,
        show_progress=False,
    ) as llm:
        yield llm


def compare(
    plain: LLM, llm: LLM, method: str, num_drafts: int, prompts: list[Any], temperature: float, options: Any
) -> None:
    """Prints the line of a method, number of drafts and temperature."""
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=options.output_len, ignore_eos=True, detokenize=False
    )
    speculation = llm.engine.speculation
    assert isinstance(speculation, Speculation)
    chosen = speculation.chooser
    always = AllDrafts()
    speculation.chooser, speculation.counts = always, DraftCounts()
    scored = SamplingParams(temperature=temperature, seed=1, max_tokens=options.output_len, ignore_eos=True, logprobs=2)
    same = "equal answers" if answers(plain, prompts, scored) == answers(llm, prompts, scored) else "ANSWERS DIFFER"
    counts = speculation.counts
    places = " ".join(f"{right / counts.num_drafts:.2f}" for right in counts.num_accepted_by_position)
    rates: dict[str, list[float]] = {"plain": [], "always": [], "chosen": []}
    for turn in range(options.repeats + 1):
        for name, each in rates.items():
            speculation.chooser = always if name == "always" else chosen
            rate = tokens_a_second(plain if name == "plain" else llm, prompts, params)
            if turn:  # the first compiles
                each.append(rate)
    speculation.chooser = chosen
    off, on, adapted = (statistics.median(each) for each in rates.values())
    print(
        f"{method}, k = {num_drafts}, temperature {temperature:g}: right by place {places}; "
        f"{1 + counts.num_accepted_tokens / counts.num_drafts:.2f} tokens a step; "
        f"{off:.0f} tok/s without, {on / off:.2f}x with all drafts, {adapted / off:.2f}x as chosen; {same}",
        flush=True,
    )


def answers(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    """Tokens, and log-probabilities by their bits."""
    completions = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    return [
        (list(each.token_ids), [{token: v.logprob.hex() for token, v in e.items()} for e in each.logprobs or ()])
        for each in completions
    ]


def tokens_a_second(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
    """Of decoding, one prompt after the other, from each one's first token on."""
    seconds, num_tokens = 0.0, 0
    for prompt in prompts:
        request = llm.engine.add_request("0", prompt["prompt_token_ids"], params)
        started = None
        while llm.engine.has_unfinished:
            llm.engine.step()
            if started is None and request.completions[0].sequence.output_token_ids:
                started = time.perf_counter()
        assert started is not None
        seconds += time.perf_counter() - started
        num_tokens += len(request.output().outputs[0].token_ids) - 1
    return num_tokens / seconds


def compare_with_reference(llm: LLM, method: str, prompts: list[Any], num_drafts: int, options: Any) -> None:
    """Prints how many drafts are those of the reference."""
    speculation = llm.engine.speculation
    assert isinstance(speculation, Speculation)
    propose, found = speculation.drafter.propose, []

    def recorded(requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        drafts = propose(requests)
        found.extend(
            (sequence.token_ids(0, sequence.num_tokens), list(each))
            for (sequence, _), each in zip(requests, drafts, strict=True)
        )
        return drafts

    speculation.drafter.propose = recorded
    speculation.chooser = AllDrafts()
    llm.generate(prompts[:2], SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True))
    reference = reference_drafter(method, options.folder)
    found = found[:: max(1, len(found) // (NUM_COMPARED // num_drafts))]
    pairs = [
        (draft, expected)
        for tokens, drafts in found
        for draft, expected in zip(drafts, reference(tokens, len(drafts)), strict=True)
    ]
    num_equal = sum(draft == expected for draft, expected in pairs)
    print(f"{method}, k = {num_drafts}: {num_equal} of {len(pairs)} drafts equal the reference's", flush=True)


if __name__ == "__main__":
    main()
