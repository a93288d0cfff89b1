"""Exact match of a model on questions with known answers, by each path through the engine.

    python benchmarks/exact_match.py
    python benchmarks/exact_match.py --dtype bfloat16 --path batch
    python benchmarks/exact_match.py --quantization int8

A row of the file has `messages`, the `answer` expected word for word, and `tools` where the conversation has any. The
embedded model on its own held-out questions is the default: what it loses is what a kernel, a cache or a smaller type
costs.

Paths: "whole" asks, without a cache, whether each of the answer's tokens is the most likely one after those before it;
"paged" generates question by question through the KV cache; "batch" generates with 32 requests at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxis import LLM, SamplingParams

QUESTIONS = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny_eval.jsonl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=256)
MAX_NUM_SEQS = {"whole": 1, "paged": 1, "batch": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: the embedded model)")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="JSON lines (default: the embedded model's)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of cached keys and values (default: %(default)s)")
    parser.add_argument("--quantization", metavar="NAME|FILE", help="int8, int4, or a file with rules")
    parser.add_argument("--path", choices=MAX_NUM_SEQS, action="append", help="default: all, one after the other")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    for path in arguments.path or MAX_NUM_SEQS:
        with LLM(
            arguments.model,
            dtype=arguments.dtype,
            kv_cache_dtype=arguments.kv_cache_dtype,
            quantization=arguments.quantization,
            max_num_seqs=MAX_NUM_SEQS[path],
            show_progress=False,
        ) as llm:
            start = time.perf_counter()
            right = is_likeliest(llm, rows) if path == "whole" else is_generated(llm, rows)
            seconds = time.perf_counter() - start
        scheme = arguments.quantization or "unquantized"
        rate = f"{sum(right)} of {len(rows)} right, {np.mean(right):.2%}"
        print(f"{path:6} {arguments.dtype} {scheme}: {rate} ({seconds:.0f} s)")


def is_generated(llm: LLM, rows: list[dict[str, Any]]) -> list[bool]:
    """Whether each answer is what the model writes."""
    prompts = [{"prompt_token_ids": encode(llm, row)} for row in rows]
    outputs = llm.generate(prompts, GREEDY)
    return [output.outputs[0].text == row["answer"] for output, row in zip(outputs, rows, strict=True)]


def is_likeliest(llm: LLM, rows: list[dict[str, Any]]) -> list[bool]:
    """Whether each token of each answer, and the end of its turn, is the most likely one."""
    right = []
    for row in rows:
        prompt = encode(llm, row)
        answer = [*llm.tokenizer.encode(row["answer"], add_special_tokens=False), llm.tokenizer.eos_token_id]
        logits = llm.compute_logits(prompt + answer, path="whole")
        right.append(logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == answer)
    return right


def encode(llm: LLM, row: dict[str, Any]) -> list[int]:
    return llm.tokenizer.encode_chat(row["messages"], tools=row.get("tools"), add_generation_prompt=True)


if __name__ == "__main__":
    main()
