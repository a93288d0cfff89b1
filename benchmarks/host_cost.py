"""Measures what a decode step costs the host: scheduling, packing and processing, with devices that take no time.

python benchmarks/host_cost.py
python benchmarks/host_cost.py --data-parallel-size 8 --sequences 64 --context 2000 --steps 200
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jaxis import SamplingParams
from jaxis.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.config.hf_config import HFConfig
from jaxis.engine.engine import LLMEngine
from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.execution.step_programs import ForwardKey, SampleKey
from jaxis.engine.opened_model import EMBEDDED_MODEL

BLOCK_SIZE = 16
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.1, max_tokens=None, ignore_eos=True),
}


class IdlePrograms:
    """Programs that compute nothing: every sequence samples token 1, at once.

    Args:
      num_ranks: Data ranks.
      num_blocks: Blocks of each.
      max_model_len: Most tokens of a sequence.
    """

    def __init__(self, num_ranks: int, num_blocks: int, max_model_len: int) -> None:
        self._num_ranks = num_ranks
        plan = SimpleNamespace(
            num_blocks={FULL_CONTEXT: num_blocks},
            max_model_len=max_model_len,
            bytes_per_block={},
            num_state_slots=None,
            bytes_per_slot=0,
        )
        # Without layers.
        model = SimpleNamespace(model=None, hidden_states=np.zeros((1, 1), np.float32))
        context = SimpleNamespace(ranks=SimpleNamespace(num_ranks=num_ranks), variants=None, model=model)
        stage = SimpleNamespace(is_native=False, context=context)
        self.executor = SimpleNamespace(plan=plan, num_stages=1, stages=[stage])
        self.last_wait = None

    def precompile(self, key: ProgramKey) -> None:
        """There is nothing to compile."""

    def run(self, key: ProgramKey, vector: np.ndarray | None) -> SamplerOutput | None:
        """Of a forward pass, checks the vector's length; of the sampler, a token for each row."""
        if isinstance(key, SampleKey):
            return SamplerOutput(cast(Any, np.ones(self._num_ranks * key.num_rows, np.int32)), None)
        assert isinstance(key, ForwardKey)
        assert vector is not None
        assert len(vector) == self._num_ranks * key.shape.packed_size
        return None


def make_engine(num_ranks: int, num_sequences: int, context: int, num_steps: int) -> LLMEngine:
    """An engine whose ranks each decode so many sequences of so many tokens."""
    max_model_len = context + num_steps + 2
    config = VllmConfig(
        ModelConfig(str(EMBEDDED_MODEL), HFConfig.from_folder(EMBEDDED_MODEL), max_model_len=max_model_len),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig(num_sequences, 2048),
    )
    num_blocks = num_sequences * -(-max_model_len // BLOCK_SIZE)
    programs = IdlePrograms(num_ranks, num_blocks, max_model_len)
    return LLMEngine(config, cast(Programs, programs), tokenizer=None, eos_token_ids=frozenset())


def step_seconds(step: Callable[[], Any], num_steps: int) -> list[float]:
    """What each call takes."""
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-parallel-size", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--sequences", type=int, default=64, help="of each rank")
    parser.add_argument("--context", type=int, default=2000, help="tokens of a sequence's prompt")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for num_ranks in args.data_parallel_size:
        for kind, params in KINDS.items():
            engine = make_engine(num_ranks, args.sequences, args.context, 2 * args.steps)
            for i in range(num_ranks * args.sequences):
                engine.add_request(str(i), rng.integers(0, engine.runner.vocab_size, args.context).tolist(), params)
            while engine.scheduler.num_waiting or engine.scheduler.ranks[0].num_pending_tokens > args.sequences:
                engine.step()
            seconds = step_seconds(engine.step, args.steps)
            median, worst = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
            print(
                f"{num_ranks} ranks x {args.sequences} sequences, {kind}: {median:.2f} ms a step, {worst:.2f} at most"
            )


if __name__ == "__main__":
    main()
