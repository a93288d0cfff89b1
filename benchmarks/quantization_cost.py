"""What each quantization costs: bytes, exact match, divergence from the unquantized model.

    python benchmarks/quantization_cost.py
    python benchmarks/quantization_cost.py --model ./Qwen3-0.6B --random-tokens 512
    python benchmarks/quantization_cost.py --quantization int8 --quantization my_rules.yaml

Prints a Markdown table. KL is the mean divergence, in nats, of the quantized model's next-token distribution from the
unquantized one's, and top-1 the share of tokens whose most likely successor is the same; both over the answers of the
questions, or over random token ids, for which a model needs no tokenizer and exact match is not defined.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exact_match import QUESTIONS, encode
from jaxis import LLM

SCHEMES = ("none", "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: the embedded model)")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="JSON lines (default: the embedded model's)")
    parser.add_argument("--random-tokens", type=int, metavar="N", help="compare on N random token ids instead")
    parser.add_argument("--quantization", action="append", metavar="NAME|FILE", help=f"default: {', '.join(SCHEMES)}")
    parser.add_argument("--dtype", default="float32", help="of activations (default: %(default)s)")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    wanted: list[Any] = [None, *(name for name in arguments.quantization or SCHEMES if name != "none")]

    # One model at a time is in memory; the unquantized one's predictions are kept.
    baseline: list[np.ndarray] = []
    print("| quantization | weights | exact match | KL | top-1 |\n|---|---|---|---|---|")
    for quantization in wanted:
        with LLM(arguments.model, dtype=arguments.dtype, quantization=quantization, show_progress=False) as llm:
            right, divergence, agreement = [], [], []
            if arguments.random_tokens:
                samples = iter([random_tokens(llm, arguments.random_tokens)])
            else:
                samples = answers(llm, rows)
            for index, (logits, answer) in enumerate(samples):
                log_probs = log_softmax(logits)
                if quantization is None:
                    baseline.append(log_probs)
                expected = baseline[index]
                divergence += (np.exp(expected) * (expected - log_probs)).sum(axis=-1).tolist()
                best = log_probs.argmax(axis=-1)
                agreement += (best == expected.argmax(axis=-1)).tolist()
                if answer is not None:
                    right.append(best.tolist() == answer)
            weights = f"{llm.weight_bytes / 1e6:.1f} MB"
        match = f"{np.mean(right):.2%}" if right else "-"
        print(
            f"| {quantization or 'none'} | {weights} | {match} | {np.mean(divergence):.5f} | {np.mean(agreement):.2%} |"
        )


def answers(llm: LLM, rows: list[dict[str, Any]]) -> Iterator[tuple[np.ndarray, list[int] | None]]:
    """(Logits [tokens, V] that predict each token of the answer and its end, those tokens) of every question."""
    for row in rows:
        prompt = encode(llm, row)
        answer = [*llm.tokenizer.encode(row["answer"], add_special_tokens=False), llm.tokenizer.eos_token_id]
        logits = llm.compute_logits(prompt + answer, path="whole")
        yield logits[len(prompt) - 1 : -1], answer


def random_tokens(llm: LLM, num_tokens: int) -> tuple[np.ndarray, list[int] | None]:
    vocab_size = llm.compute_logits([0]).shape[-1]
    token_ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens).tolist()
    return llm.compute_logits(token_ids, path="whole"), None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    main()
