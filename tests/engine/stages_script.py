"""Compares pipeline stages with one device: `python -m tests.engine.stages_script FOLDER SIZES [KINDS [ARGUMENTS]]`.

SIZES are pipeline x tensor, such as 2x1,2x2; KINDS are quick or all; ARGUMENTS further ones of LLM as JSON. A process
of its own, for its devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxis import LLM, SamplingParams
from jaxis.engine.execution.sampling_packer import SamplingPacker
from tests.engine.ranks_script import all_answers, check_failed_step, check_stream_and_abort, compare, quick_answers
from tests.engine.test_same_answer import PROMPTS, SIMPLE, run, tokens

SIZES = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kv_cache_memory": "8MiB", "show_progress": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)


def start(folder: str, stages: int = 1, tensor: int = 1, **arguments: Any) -> LLM:
    return LLM(folder, pipeline_parallel_size=stages, tensor_parallel_size=tensor, **SIZES | arguments)


def check_places(llm: LLM, whole: dict[str, int], stages: int, tensor: int) -> None:
    """Each stage has its own layers on its own devices, and nothing else; only a tied table is in two."""
    executors = llm.engine.runner.executor.stages
    assert len(executors) == stages
    seen: set[str] = set()
    for index, stage in enumerate(executors):
        arrays = jax.tree.leaves((stage.context.model.arrays, stage.state.caches))
        devices = {device.id for array in arrays for device in array.devices()}
        assert devices == set(range(index * tensor, (index + 1) * tensor)), index
        own = {name: size for name, size in stage.context.model.bytes_by_name().items() if size}
        if tensor == 1:
            assert own == {name: whole[name] for name in own}, index
        shared = seen & own.keys()
        assert all("embed_tokens" in name for name in shared), shared
        seen |= own.keys()
        numbers = {name.split(".layers.")[1].split(".")[0] for name in own if ".layers." in name}
        assert numbers, index
        assert len(numbers) <= -(-num_layers(whole) // stages)
        assert any("embed_tokens" in name for name in own) or index > 0
    expected = {name for name, size in whole.items() if size}
    assert tensor > 1 or seen == expected  # with several devices, weights are stored otherwise


def num_layers(whole: dict[str, int]) -> int:
    return len({name.split(".layers.")[1].split(".")[0] for name in whole if ".layers." in name})


def bits(llm: LLM) -> Any:
    """The log-probabilities of greedy requests together, bit for bit."""
    outputs = run(llm, [(prompt, GREEDY) for prompt in PROMPTS])
    return [[{t: v.logprob.hex() for t, v in e.items()} for e in output.outputs[0].logprobs] for output in outputs]


def check_overlap(llm: LLM, stages: int) -> None:
    """As many steps are in flight as there are stages, with different sequences."""
    engine, most = llm.engine, 0
    for i in range(8):
        engine.add_request(str(i), PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        entries = [entry for step in engine.steps for entry in step.output.scheduled if entry.samples]
        assert len(entries) == len({entry.sequence.seq_id for entry in entries})
        if len(list(engine.steps)) == stages:
            most = max(most, len(entries))
    assert most == 8


def check_parameters(llm: LLM, stages: int) -> None:
    """A step's sampling parameters do not lie where those of steps in flight do, which devices may still read."""
    packer, vectors = llm.engine.runner._sampling_packer, []

    def pack(*arguments: Any) -> np.ndarray:
        vectors.append(SamplingPacker.pack(packer, *arguments))
        assert not any(np.shares_memory(vectors[-1], other) for other in vectors[-1 - stages : -1])
        return vectors[-1]

    with mock.patch.object(packer, "pack", pack):
        run(llm, SIMPLE)
    assert len(vectors) > 24


def check_preemption(folder: str, stages: int, tensor: int, expected: list[Any], **arguments: Any) -> None:
    """Blocks for far fewer tokens than run at once."""
    with start(folder, **arguments) as llm:
        block_bytes = sum(llm.engine.runner.kv_bytes_per_block.values())
    scarce = {"max_model_len": 128, "kv_cache_memory": 12 * block_bytes * max(1, tensor // 2)}
    with start(folder, stages, tensor, **arguments | scarce, enable_prefix_caching=False) as llm:
        assert tokens(run(llm, SIMPLE)) == expected
        assert llm.engine.num_preemptions > 0


def main(folder: str, sizes: str, kinds: str = "quick", arguments: str = "{}") -> None:
    given = json.loads(arguments)
    function = quick_answers if kinds == "quick" else all_answers
    with start(folder, **given) as llm:
        is_native = llm.engine.runner.executor.stages[-1].is_native
        expected, expected_bits = function(llm), bits(llm)
        whole = llm.engine.runner.bytes_by_weight()
    for size in sizes.split(","):
        stages, tensor = map(int, size.split("x"))
        with start(folder, stages, tensor, **given) as llm:
            check_places(llm, whole, stages, tensor)
            compare(function(llm), expected)
            if tensor == 1 and is_native:
                assert bits(llm) == expected_bits
            check_parameters(llm, stages)
            check_overlap(llm, stages)
            if kinds == "all":
                check_stream_and_abort(llm, expected["simple"])
                check_failed_step(llm, expected["simple"])
            has_states = llm.engine.runner.num_state_slots is not None
        if kinds == "all" and not has_states:  # whose slots take most of so little memory
            check_preemption(folder, stages, tensor, expected["simple"], **given)
        print(size, "is as one device", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
