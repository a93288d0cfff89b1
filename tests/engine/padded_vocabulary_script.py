"""Compares devices that have rows of zeros after a vocabulary with those that have none.

`python -m tests.engine.padded_vocabulary_script FOLDER SIZES [KINDS [ARGUMENTS]]`: SIZES are pipeline x data x tensor,
such as 1x1x4; KINDS are few, compared with one device, or quick or all, compared with as many devices with tables that
are whole on each; ARGUMENTS further ones of LLM as JSON. A process of its own, for its devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxis import LLM, SamplingParams
from jaxis.engine import setup
from jaxis.engine.execution.model_size import model_size
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.module import named_modules
from jaxis.parallel import mesh
from tests.engine.ranks_script import all_answers, compare, quick_answers
from tests.engine.test_same_answer import PROMPTS, SIMPLE, run, tokens

SIZES = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kv_cache_memory": "8MiB", "show_progress": False}


def start(folder: str, pipeline: int = 1, data: int = 1, tensor: int = 1, **arguments: Any) -> LLM:
    sizes = {"pipeline_parallel_size": pipeline, "data_parallel_size": data, "tensor_parallel_size": tensor}
    with mock.patch.object(setup, "check_ranks_share"):
        return LLM(folder, **SIZES | sizes | arguments)


def far_below_zero(llm: LLM, num_kinds: int) -> tuple[list[Any], list[float]]:
    """What is sampled where every token of the vocabulary has a logit far below those of rows of zeros."""
    bias = dict.fromkeys(range(llm.engine.runner.vocab_size), -100.0)
    common = {"max_tokens": 5, "ignore_eos": True, "logit_bias": bias, "logprobs_mode": "processed_logprobs"}
    kinds = [{"temperature": 0.0}, {"top_k": 3}, {"temperature": 2.0}, {"top_p": 0.5}, {"min_p": 0.1}]
    params = [SamplingParams(**common, seed=i, logprobs=20, **kind) for i, kind in enumerate(kinds[:num_kinds])]
    outputs = run(llm, list(zip(PROMPTS, params, strict=False)))
    steps = [entries for output in outputs for entries in output.outputs[0].logprobs]
    # Of many kept tokens, 20 are told, so that the sums of all steps are compared.
    sums = [float(sum(np.exp(each.logprob) for each in entries.values())) for entries in steps]
    assert max(token for entries in steps for token in entries) < llm.engine.runner.vocab_size
    return [output.outputs[0].token_ids for output in outputs], sums


def check_parts(llm: LLM, tensor: int) -> None:
    """Each device has a part of every table and head, as large as the others', and of the padding less than a row."""
    modules = [module for model in llm.engine.runner.models for _, module in named_modules(model)]
    tables = [module for module in modules if isinstance(module, JaxEmbed | JaxLmHead)]
    assert tables
    for table in tables:
        for array in jax.tree.leaves(table.weight.get_value()):
            assert {part.data.shape[0] for part in array.addressable_shards} == {-(-table.output_size // tensor)}


def few_answers(llm: LLM) -> dict[str, Any]:
    """A greedy and a seeded sequence, and logits."""
    return {"few": tokens(run(llm, SIMPLE[:2])), "whole": llm.compute_logits(PROMPTS[0]).tolist()}


FUNCTIONS = {"few": few_answers, "quick": quick_answers, "all": all_answers}


def main(folder: str, sizes: str, kinds: str = "few", arguments: str = "{}") -> None:
    given, function, is_few = json.loads(arguments), FUNCTIONS[kinds], kinds == "few"

    def answers(llm: LLM) -> tuple[Any, ...]:
        return function(llm), *far_below_zero(llm, 2 if is_few else 5), model_size(*llm.engine.runner.models)

    if is_few:
        with start(folder, **given) as llm:
            expected = answers(llm)
    for name in sizes.split(","):
        pipeline, data, tensor = map(int, name.split("x"))
        if not is_few:
            with (
                mock.patch.object(mesh, "PADDED_ROWS", frozenset()),
                start(folder, pipeline, data, tensor, **given) as llm,
            ):
                expected = answers(llm)
        with start(folder, pipeline, data, tensor, **given) as llm:
            check_parts(llm, tensor)
            found, size = answers(llm), llm.engine.runner.vocab_size
            assert size % tensor
            assert llm.compute_logits(PROMPTS[0]).shape == (len(PROMPTS[0]), size)
        compare(found[0], expected[0])
        assert found[1] == expected[1]
        np.testing.assert_allclose(found[2], expected[2], rtol=1e-3)
        assert found[3] == expected[3], "padding is no parameter"
        print(name, "is as one device" if is_few else "is as with whole tables", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
