"""A leader for the tests of several hosts.

`python -m tests.engine.hosts.leader SCENARIO MODEL NUM_HOSTS SIZE PORT ARGUMENTS`. SIZE is the number of devices of a
stage, data x tensor for data ranks, or stages x data x tensor. ARGUMENTS are further ones of LLM, as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from jaxis import LLM, SamplingParams
from jaxis.engine import setup
from jaxis.engine.client.engine_client import EngineInfo
from jaxis.errors import EngineError
from tests.engine.test_same_answer import MIXED, PROMPTS, SIMPLE, run, tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NUM_MIXED = 13  # one of each kind


def start(model: str, num_hosts: int, size: str, port: int, **arguments: Any) -> LLM:
    """An LLM with so few blocks that sequences are preempted, unless it gets others; a dense one may have ranks."""
    num_stages, num_ranks, num_devices = [1, 1, *map(int, size.split("x"))][-3:]
    defaults = {
        "nnodes": num_hosts,
        "tensor_parallel_size": num_devices,
        "pipeline_parallel_size": num_stages,
        "data_parallel_size": num_ranks,
        "master_port": port,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "max_model_len": 128,
        # With more devices than kv heads, each has a whole one.
        "kv_cache_memory": 14 * 8192 * max(1, num_devices // 2) * num_ranks,
        "show_progress": False,
    }
    with mock.patch.object(setup, "check_ranks_share"):
        return LLM(model, **defaults | arguments)


def short_answers(llm: LLM) -> dict[str, Any]:
    """Greedy and seeded tokens, a prefix hit, an abort, a step that fails before it is sent, the parameters."""
    answers: dict[str, Any] = {"tokens": tokens(run(llm, SIMPLE[:4]))}
    answers["parameters"] = EngineInfo.of(llm._generator).num_parameters
    stream = llm.stream(PROMPTS[3], GREEDY)
    next(stream)
    stream.close()
    hit = run(llm, [(PROMPTS[3], GREEDY)])
    answers["hit"] = [hit[0].num_cached_tokens > 0, tokens(hit)]
    runner = llm.engine.runner
    dispatch = runner.dispatch
    runner.dispatch = _fail
    try:
        llm.generate([PROMPTS[1]], GREEDY)
    except EngineError as error:
        answers["failed"] = str(error)
    runner.dispatch = dispatch
    answers["after"] = tokens(run(llm, [(PROMPTS[1], GREEDY)]))
    return answers


def answers_of_every_kind(llm: LLM) -> dict[str, Any]:
    """What `short_answers` has, all kinds of parameters, preemption, and log-probabilities of prompts."""
    answers = short_answers(llm)
    answers["mixed"] = tokens(run(llm, MIXED[:NUM_MIXED]))
    answers["many"] = tokens(run(llm, SIMPLE))
    answers["preempted"] = llm.engine.num_preemptions > 0
    [scored] = llm.generate([PROMPTS[2]], SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, logprobs=2))
    assert scored.prompt_logprobs is not None
    answers["ranks"] = [sorted(entry) for entry in scored.prompt_logprobs[1:] if entry is not None]
    answers["whole"] = llm.compute_logits(PROMPTS[2]).tolist()
    answers["paged"] = llm.compute_logits(PROMPTS[2], path="paged").tolist()
    return answers


def _fail(*_: object) -> None:
    raise RuntimeError("a fault of the leader")


def family_answers(llm: LLM) -> dict[str, Any]:
    """Greedy tokens, and logits of a prompt at once and through the caches."""
    from tests.support import parity  # with PyTorch

    [output] = llm.generate([parity.prompt(17)], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    tokens = parity.prompt(parity.PAGED_LENGTH)
    logits = {path: llm.compute_logits(tokens, path=path).tolist() for path in ("whole", "paged")}
    return {"tokens": list(output.outputs[0].token_ids), **logits}


def endless(llm: LLM) -> dict[str, Any]:
    """Generates until that fails; what the error says, and that of the next request."""
    return _until_lost(llm, lambda _: (PROMPTS[1], GREEDY))


def prefills(llm: LLM) -> dict[str, Any]:
    """As `endless`, with steps of prompts only."""
    return _until_lost(llm, lambda turn: ([turn % 370, *PROMPTS[4]], SamplingParams(temperature=0.0, max_tokens=1)))


def decodes(llm: LLM) -> dict[str, Any]:
    """As `endless`, with steps of one token almost only."""
    return _until_lost(llm, lambda _: (PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)))


def _until_lost(llm: LLM, request: Callable[[int], tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    errors = []
    try:
        for turn in itertools.count():
            prompt, params = request(turn)
            llm.generate([prompt], params)
            print("generated", flush=True)
    except EngineError as error:
        errors.append(str(error))
    print(f"lost at {time.time()}", flush=True)
    try:
        llm.generate([PROMPTS[1]], GREEDY)
    except EngineError as error:
        errors.append(str(error))
    return {"errors": errors}


if __name__ == "__main__":
    _, scenario, model, num_hosts, size, port, given = sys.argv
    function = {
        "short": short_answers,
        "all": answers_of_every_kind,
        "family": family_answers,
        "endless": endless,
        "prefills": prefills,
        "decodes": decodes,
    }[scenario]
    arguments = {"kv_cache_memory": 4 << 20} if scenario == "family" else {}
    with start(model, int(num_hosts), size, int(port), **arguments | json.loads(given)) as llm:
        print("ANSWERS", json.dumps(function(llm)), flush=True)
    print("closed", flush=True)
