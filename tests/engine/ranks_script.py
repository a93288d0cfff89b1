"""Compares data ranks with one device: `python -m tests.engine.ranks_script FOLDER SIZES [ARGUMENTS]`.

SIZES are data x tensor, such as 2x1,2x2; ARGUMENTS further ones of LLM as JSON. A process of its own, for its devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine import setup
from jaxis.errors import EngineError
from tests.engine.expert_parallel import shares
from tests.engine.test_same_answer import MIXED, PROMPTS, SIMPLE, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, logprobs=2)


def start(folder: str, data: int = 1, tensor: int = 1, **arguments: Any) -> LLM:
    """An LLM of so many ranks and devices; a dense model may have ranks, as the smallest one to test."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kv_cache_memory": "8MiB", "show_progress": False}
    if data == 1:
        arguments.pop("enable_expert_parallel", None)
    with mock.patch.object(setup, "check_ranks_share"):
        return LLM(folder, data_parallel_size=data, tensor_parallel_size=tensor, **sizes | arguments)


def quick_answers(llm: LLM) -> dict[str, Any]:
    """Greedy, seeded and structured sequences together, then as prefix hits, and one request alone."""
    answers: dict[str, Any] = {"simple": tokens(run(llm, SIMPLE))}
    hits = run(llm, SIMPLE)
    assert sum(hit.num_cached_tokens or 0 for hit in hits) >= 96
    answers["hits"] = tokens(hits)
    answers["alone"] = tokens(run(llm, [(PROMPTS[4], GREEDY)]))
    return answers


def all_answers(llm: LLM) -> dict[str, Any]:
    """`quick_answers`, every kind of parameters beside every other, scored prompts, and logits."""
    answers = quick_answers(llm) | {"mixed": tokens(run(llm, MIXED))}
    scored = run(llm, [(prompt, SCORED) for prompt in PROMPTS])
    answers["scored"] = tokens(scored)
    answers["prompt logprobs"] = [
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        for output, prompt in zip(scored, PROMPTS, strict=True)
    ]
    answers["whole"] = llm.compute_logits(PROMPTS[2]).tolist()
    answers["paged"] = llm.compute_logits(PROMPTS[2], path="paged").tolist()
    return answers


def compare(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answers.keys() == expected.keys()
    for name, value in expected.items():
        if name in ("prompt logprobs", "paged", "whole"):
            for one, other in zip(answers[name], value, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3, err_msg=name)
        else:
            assert answers[name] == value, name


def check_stream_and_abort(llm: LLM, expected: list[Any]) -> None:
    """A stream that is left in the middle changes no other request's tokens."""
    engine = llm.engine
    for i in range(3):
        engine.add_request(f"left {i}", PROMPTS[i], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    for _ in range(6):
        engine.step()
    for i in range(3):
        output = engine.abort_request(f"left {i}")
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
    assert tokens(run(llm, SIMPLE)) == expected


def check_failure_of_one_rank(llm: LLM) -> None:
    """Damaged keys and values of one rank fail its own request; those of the others go on."""
    engine = llm.engine
    expected = tokens(run(llm, [(prompt, GREEDY) for prompt in PROMPTS[:2]]))
    engine.reset()
    requests = [engine.add_request(str(i), PROMPTS[i], GREEDY) for i in range(2)]
    for _ in range(4):
        engine.step()
    ranks = engine.scheduler.ranks
    [first] = {rank for rank in range(len(ranks)) if requests[0].completions[0].sequence.seq_id in ranks[rank]}
    assert requests[1].completions[0].sequence.seq_id not in ranks[first]
    num_blocks = next(iter(engine.runner.num_blocks.values()))
    is_damaged = np.arange(num_blocks * len(ranks)) // num_blocks == first
    executor = engine.runner.executor
    executor.state.caches = jax.tree.map(
        lambda array: jax.device_put(
            np.where(is_damaged[:, None, None, None], np.nan, array).astype(array.dtype), array.sharding
        ),
        executor.state.caches,
    )
    while engine.has_unfinished:
        engine.step()
    assert isinstance(requests[0].error, EngineError)
    assert "not finite" in str(requests[0].error)
    assert requests[1].error is None
    assert requests[1].output().outputs[0].token_ids == expected[1][0]
    engine.reset()
    assert tokens(run(llm, [(prompt, GREEDY) for prompt in PROMPTS[:2]])) == expected


def check_failed_step(llm: LLM, expected: list[Any]) -> None:
    """A step that fails loses its requests, and the next ones are as ever."""
    runner = llm.engine.runner
    failure = pytest.raises(EngineError, match="a step failed and 5 requests were lost: a fault")
    with failure, mock.patch.object(runner, "dispatch", side_effect=RuntimeError("a fault")):
        llm.generate(PROMPTS, GREEDY)
    assert tokens(run(llm, SIMPLE)) == expected


def check_preemption(folder: str, data: int, tensor: int, expected: list[Any], **arguments: Any) -> None:
    """Blocks for far fewer tokens than run at once."""
    with start(folder, **arguments) as llm:
        block_bytes = sum(llm.engine.runner.kv_bytes_per_block.values())
    scarce = {"max_model_len": 128, "kv_cache_memory": 10 * block_bytes * data * max(1, tensor // 2)}
    with start(folder, data, tensor, **arguments | scarce, enable_prefix_caching=False) as llm:
        num_blocks = [rank.block_manager.num_blocks for rank in llm.engine.scheduler.ranks]
        assert len(set(num_blocks)) == 1
        assert tokens(run(llm, SIMPLE)) == expected
        assert llm.engine.num_preemptions > 0, num_blocks


def main(folder: str, sizes: str, arguments: str = "{}", kinds: str = "quick") -> None:
    given = json.loads(arguments)
    function = quick_answers if kinds == "quick" else all_answers
    with start(folder, **given) as llm:
        expected = function(llm)
    for size in sizes.split(","):
        data, tensor = map(int, size.split("x"))
        with start(folder, data, tensor, **given) as llm:
            compare(function(llm), expected)
            if given.get("enable_expert_parallel"):
                assert shares(llm.engine.runner.model) == {1 / (data * tensor)}
            if kinds == "all":
                check_stream_and_abort(llm, expected["simple"])
                check_failed_step(llm, expected["simple"])
                check_failure_of_one_rank(llm)
        if kinds == "all":
            check_preemption(folder, data, tensor, expected["simple"], **given)
        print(size, "is as one device", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
