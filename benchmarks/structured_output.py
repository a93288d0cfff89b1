"""Structured output over the cases of the JSON Schema Test Suite: what compiles, what is accepted, how long masks take.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/structured_output.py JSON-Schema-Test-Suite/tests/draft2020-12 --model FOLDER

Times are of the processor, on one thread, and say nothing about the model.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxis import StructuredOutputs
from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer


class Measured:
    """Microseconds of each call, by what was called."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = collections.defaultdict(list)

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time()
        result = function(*arguments)
        self.times[name].append((time.thread_time() - start) * 1e6)
        return result


def accepts(grammar: CompiledGrammar, token_ids: list[int], end: int, measured: Measured) -> bool:
    """Whether the tokens can be generated one by one, and then the end."""
    matcher = grammar.new_matcher()
    for i, token_id in enumerate([*token_ids, end]):
        if token_id == end and matcher.is_complete:
            return True
        mask = measured("mask", matcher.token_mask)
        if not mask[token_id // 32] >> (token_id % 32) & 1:
            return False
        measured("take in a token", matcher.follow, token_ids[: i + 1])
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of the suite's drafts")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder with the tokenizer")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_path(arguments.model)
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end])
    measured = Measured()
    compiler.compile(StructuredOutputs(json_object=True))
    num_schemas = num_compiled = 0
    verdicts: collections.Counter[tuple[bool, bool]] = collections.Counter()
    for path in sorted(file for folder in arguments.folders for file in folder.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            if not isinstance(case["schema"], dict):
                continue
            num_schemas += 1
            try:
                # On this thread, which `compile` leaves to another one.
                grammar = measured("compile", compiler._compile, StructuredOutputs(json_schema=case["schema"]))
            except RequestError:
                continue
            num_compiled += 1
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                token_ids = tokenizer.encode(text, add_special_tokens=False)
                if tokenizer.decode(token_ids) != text:
                    continue  # a normalizer made another value of it
                verdicts[test["valid"], accepts(grammar, token_ids, end, measured)] += 1
    print(f"{num_compiled} of {num_schemas} schemas compiled, for {tokenizer.vocab_size} tokens")
    for valid in (True, False):
        total = verdicts[valid, True] + verdicts[valid, False]
        print(f"{'valid' if valid else 'invalid'} values accepted: {verdicts[valid, True]} of {total}")
    for name, times in measured.times.items():
        figures = ", ".join(
            f"{label} {np.percentile(times, q):.0f}" for label, q in (("50%", 50), ("90%", 90), ("99%", 99))
        )
        print(f"{name}, us: {figures}, largest {max(times):.0f}")


if __name__ == "__main__":
    main()
