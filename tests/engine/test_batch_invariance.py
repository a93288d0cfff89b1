"""With native kernels, a request's results are batch-invariant, and do not depend on chunking, caching or threads.

Each run is a process of its own, with as many threads as it is told and with XLA's usual optimizations.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from jaxis.kernels import native

pytestmark = [
    pytest.mark.production_xla,
    pytest.mark.skipif(not native.usable(), reason="needs the native kernels"),
]

NUM_TOKENS = 12
ALL = len(os.sched_getaffinity(0))
FEW_THREADS, MANY_THREADS = sorted({1, 7, ALL}), sorted({1, 2, 3, 4, 7, 16, ALL})  # more than processors, too
PROMPTS = [np.random.default_rng(i).integers(0, 370, length).tolist() for i, length in enumerate([3, 40, 61, 17, 90])]


class Recorder:
    """Records the hidden state of every token and the log-probabilities of every sampled one."""

    def __init__(self, llm):
        from jaxis import SamplingParams

        self.engine, self.llm = llm.engine, llm
        self.params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
        self.states = defaultdict(lambda: defaultdict(set))
        forward, state = self.engine.runner._forward, self.engine.runner.executor.state

        def recording(output, *step):
            result = forward(output, *step)
            self.record(output, np.asarray(state.hidden), np.asarray(state.rows))
            return result

        self.engine.runner._forward = recording

    def record(self, output, hidden, rows):
        row = 0
        for index, entry in enumerate(output.scheduled):
            states = self.states[tuple(entry.sequence.prompt_token_ids)]
            for position in range(entry.start, entry.start + entry.num_tokens):
                states[position].add(digest(hidden[row]))
                row += 1
            assert digest(rows[index]) == digest(hidden[row - 1])

    def run(self, prompts, *others):
        """Generates for the prompts together, and for `others` (prompt, parameters) beside them; what came of each."""
        self.states.clear()
        outputs = self.llm.generate(
            [*prompts, *(prompt for prompt, _ in others)],
            [self.params] * len(prompts) + [params for _, params in others],
        )
        return {
            str(PROMPTS.index(prompt)): {
                "hidden": {str(at): sorted(states) for at, states in self.states[tuple(prompt)].items()},
                "logprobs": [
                    {str(token): value.logprob.hex() for token, value in entry.items()}
                    for entry in output.outputs[0].logprobs
                ],
            }
            for prompt, output in zip(prompts, outputs, strict=False)
        }


def digest(row):
    return hashlib.sha256(row.tobytes()).hexdigest()[:16]


def run_of_kind(kind, recorder):
    """What a kind of run of an engine gives, from the beginning."""
    from jaxis import SamplingParams
    from jaxis.config.attention_span import FULL_CONTEXT
    from jaxis.engine.scheduling.block_manager import BlockManager

    engine = recorder.engine
    engine.reset()
    scheduler = engine.scheduler
    if kind == "beside others":
        drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, top_p=0.9)
        return recorder.run(PROMPTS[2:4], (PROMPTS[0], drawn), (PROMPTS[1] + PROMPTS[4], drawn))
    if kind.startswith("chunks of "):
        with mock.patch.object(scheduler, "max_num_batched_tokens", int(kind.removeprefix("chunks of "))):
            return recorder.run(PROMPTS)
    if kind == "preempted":
        manager = scheduler.block_manager
        num_blocks = {span: pool.num_blocks for span, pool in zip(manager.spans, manager.pools, strict=True)}
        num_blocks |= {FULL_CONTEXT: 16}
        scarce = BlockManager(num_blocks, 16, False, engine.runner.num_state_slots)
        num_before = engine.num_preemptions
        with mock.patch.multiple(scheduler, block_manager=scarce, max_num_batched_tokens=23):
            found = recorder.run(PROMPTS)
        assert engine.num_preemptions > num_before
        return found
    if kind == "prefix cache hit":
        recorder.run(PROMPTS)
    return recorder.run(PROMPTS)


def main(num_threads, model, options, kinds):
    """Prints, as JSON, what each prompt gave alone and, with all processors, in each of these kinds of runs."""
    from jaxis import LLM

    runs = {}
    with LLM(
        model,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory="8MiB",
        max_model_len=256,
        show_progress=False,
        **options,
    ) as llm:
        recorder = Recorder(llm)
        engine = llm.engine
        runs["alone"] = {}
        for prompt in PROMPTS:
            engine.reset()
            runs["alone"] |= recorder.run([prompt])
        if num_threads == ALL:
            runs |= {kind: run_of_kind(kind, recorder) for kind in kinds}
    print(json.dumps(runs))


# Family -> the name of its sizes in tiny_checkpoints.
SIZES = {
    "qwen3_5_text": "DELTA_NET_SIZES",
    "deepseek_v3": "LATENT_SIZES",
    "gpt_oss": "GPT_OSS_SIZES",
    "llama4": "LLAMA_4_SIZES",
}
BFLOAT16 = {"dtype": "bfloat16"}
# Model, the engine's arguments, and with how many threads.
CASES = {
    "plain": (None, {}, FEW_THREADS),
}
# The kernels of other types and of quantized weights, of latents, states and experts have such tests of their own, and
# so has the engine with states, in test_local_layers.py; those run every time.
SLOW_CASES = {
    "qwen3_5": ("qwen3_5_text", {}, [ALL]),
    "bfloat16": (None, BFLOAT16, [ALL]),
    "int8": (None, {"quantization": "int8"}, MANY_THREADS),
    "int4": (None, {"quantization": "int4"}, [ALL]),
    "deepseek_v3": ("deepseek_v3", {}, [ALL]),
    "gpt_oss": ("gpt_oss", {}, [ALL]),
    "llama4": ("llama4", {}, [ALL]),
    "bfloat16, int8": (None, {"quantization": "int8", **BFLOAT16}, MANY_THREADS),
    "bfloat16, int4, int8 cache": (None, {"quantization": "int4", "kv_cache_dtype": "int8", **BFLOAT16}, [ALL]),
    "bfloat16, deepseek_v3": ("deepseek_v3", BFLOAT16, [ALL]),
    "bfloat16, gpt_oss": ("gpt_oss", BFLOAT16, [ALL]),
    "bfloat16, qwen3_5": ("qwen3_5_text", BFLOAT16, [ALL]),
    "bfloat16, llama4": ("llama4", BFLOAT16, [ALL]),
    "float16": (None, {"dtype": "float16"}, [ALL]),
}


@pytest.fixture(scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def runs(request, tmp_path_factory):
    """Number of threads -> kind of run -> prompt -> what it gave."""
    from tests.support import tiny_checkpoints  # with PyTorch, which the processes below need not import

    family, options, counts = (CASES | SLOW_CASES)[request.param]
    model = None
    if family is not None:
        model = str(
            tiny_checkpoints.write_checkpoint(
                tmp_path_factory.mktemp("checkpoint"), family, **getattr(tiny_checkpoints, SIZES[family])
            )
        )
    # Those that a test of this session compares.
    tests = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]
    kinds = sorted({params["kind"] for params in tests if "kind" in params})
    found = {}
    for count in counts:
        script = (
            f"from tests.engine.test_batch_invariance import main; main({count}, {model!r}, {options!r}, {kinds!r})"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": "", "NPROC": str(count)}
        process = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr[-2000:]
        found[count] = json.loads(process.stdout.splitlines()[-1])
    return found


def assert_same(run, alone):
    for prompt, found in run.items():
        for position, states in found["hidden"].items():
            assert states == alone[prompt]["hidden"][position], f"prompt {prompt}, position {position}"
        assert found["logprobs"] == alone[prompt]["logprobs"], f"prompt {prompt}"


@pytest.mark.parametrize(
    "kind", ["together", "prefix cache hit", "beside others", "chunks of 8", "chunks of 23", "preempted"]
)
def test_is_batch_invariant_in_any_steps(runs, kind):
    assert_same(runs[ALL][kind], runs[ALL]["alone"])


def test_with_any_number_of_threads(runs):
    for run in runs.values():
        assert_same(run["alone"], runs[ALL]["alone"])


def test_the_prompts_differ(runs):
    alone = runs[ALL]["alone"]
    states = [state for found in alone.values() for [state] in found["hidden"].values()]
    # The last token of a generation is not computed any more.
    assert len(states) == sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
    assert len(set(states)) == len(states)
