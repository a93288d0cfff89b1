"""With native kernels, what families have besides Llama's layer is batch-invariant too: heads of any size, packed
projections, layer norms, caps and factors on the logits, caches and selections that layers share, several states a
token, recurrent states, experts without a gate. In a process of its own, with XLA's usual optimizations."""

import json
import os
import subprocess
import sys

import pytest

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.engine.engine import LLMEngine
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.kernels import native

pytestmark = [
    pytest.mark.production_xla,
    pytest.mark.skipif(not native.usable(), reason="needs the native kernels"),
]

NAMES = (
    *("Gemma 4, shared keys and values, embeddings of layers", "Command R+, norms on heads", "Gemma 3"),
    *("Llama, head_dim, one kv head", "Gemma 3n", "Phi-4", "Falcon-H1", "GLM-5.2", "Jamba", "Ling 3"),
    *("Nemotron 3", "OLMo Hybrid", "Qwen3.5", "Step 3.5", "RecurrentGemma", "Hy4", "Qwen3.8-Flash-Next"),
    *("GLM-5.3-Flash", "Step 5", "LongCat-Flash-Lite", "LongCat 2.0", "Ling 2.5"),
    *("Dory", "HRM-Text", "DeepSeek V4.1", "Inkling", "Inkling 2"),
)
SLOW_NAMES = ("DeepSeek V4", "IQuest-Coder Loop", "Kimi K3", "MiniMax M3")
LENGTHS = (3, 40, 61)  # of prompts, in tokens
# Families that are also run in a cache too small for them.
PREEMPTED = {"Qwen3.8-Flash-Next", "GLM-5.3-Flash", "Dory", "Inkling", "Inkling 2", *SLOW_NAMES}
BFLOAT16_NAMES = (
    *NAMES,
    "Llama 3.1",
    "Gemma 2",
    "Qwen3 MoE",
    "DeepSeek V3",
    "DeepSeek V3.2",
    "Qwen3-Next",
)


def main(dtype: str, *names: str) -> None:
    """Prints, as JSON, log-probabilities of requests alone and together, of each of these families.

    And those of families in PREEMPTED together in a cache too small for them, where some are preempted.
    """
    from jaxis import LLM, SamplingParams
    from tests.support import parity
    from tests.support.parity import prompt

    prompts = [{"prompt_token_ids": prompt(length)} for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
    found = {}
    for family in (f for f in parity.FAMILIES if f.name in names):
        with LLM(
            parity.checkpoint_folder(family),
            **{"dtype": dtype, "kv_cache_memory": "4MiB", "max_num_batched_tokens": 64, "max_model_len": 128},
            show_progress=False,
            enable_prefix_caching=False,
        ) as llm:
            alone = [llm.generate([prompt], params)[0] for prompt in prompts]
            runs = [alone, llm.generate(prompts, params)]
            if family.name in PREEMPTED:
                _make_scarce(llm.engine)
                runs.append(llm.generate(prompts, params))
                assert llm.engine.num_preemptions > 0
        found[family.name] = [[_logprobs(output) for output in outputs] for outputs in runs]
    print(json.dumps(found))


def _make_scarce(engine: LLMEngine) -> None:
    """Leaves full context the blocks of all prompts: the longest, which grows by one, preempts another."""
    manager = engine.scheduler.block_manager
    num_blocks = {span: pool.num_blocks for span, pool in zip(manager.spans, manager.pools, strict=True)}
    num_blocks[FULL_CONTEXT] = sum(-(-length // manager.block_size) for length in LENGTHS)
    slots = engine.runner.num_state_slots
    engine.scheduler.block_manager = BlockManager(num_blocks, manager.block_size, False, slots)


def _logprobs(output: object) -> list[dict[int, str]]:
    return [{token: value.logprob.hex() for token, value in entry.items()} for entry in output.outputs[0].logprobs]


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        *(("float32", NAMES), ("bfloat16", BFLOAT16_NAMES)),
        *(pytest.param(dtype, SLOW_NAMES, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
    ids=["float32", "bfloat16", "slow float32", "slow bfloat16"],
)
def test_log_probabilities_are_equal_to_the_bit_alone_together_and_after_preemption(dtype, names):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    script = "import sys; from tests.engine.test_batch_invariance_of_families import main; main(*sys.argv[1:])"
    process = subprocess.run(
        [sys.executable, "-c", script, dtype, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert set(found) == set(names)
    for name, (alone, *others) in found.items():
        assert len(others) == 1 + (name in PREEMPTED)
        assert all(run == alone for run in others), name
