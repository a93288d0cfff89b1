"""Times steps at different contexts, whose caches have random values in place of a prompt's: what a long context costs.

    python benchmarks/context_steps.py FOLDER --contexts 4096,32768
    python benchmarks/context_steps.py FOLDER --tokens 4096 --profile trace    # a chunk of a prompt; where time goes

FOLDER has the config.json of a model; its weights are random ones of the widths given there, so one can leave out
layers and experts. A step is the model without its head. Contexts take turns, so that all have the same of what else
the machine does; each line has the median and the least, and how many times those of the first context they are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

import jax
import jax.numpy as jnp
import numpy as np

from jaxis import SamplingParams
from jaxis.bench.session import BLOCK_SIZE, build_sized_engine
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.step_inputs import pack_step
from jaxis.engine.execution.step_programs import ForwardKey
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import BlockTable, Sequence, SequenceId
from jaxis.engine.scheduling.state_slots import StateStep
from jaxis.host.progress import ProgressDisplay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--contexts", default="4096,32768", help="tokens up to the end of the step")
    parser.add_argument("--tokens", type=int, default=1, help="of the step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--profile", help="folder for a trace of the last context's steps")
    options = parser.parse_args()
    contexts = [int(context) for context in options.contexts.split(",")]
    arguments = {
        "load_format": "dummy",
        "quantization": options.quantization,
        "max_num_batched_tokens": max(256, options.tokens),
        "enable_prefix_caching": False,
    }
    engine = build_sized_engine(
        options.model, arguments, max_num_seqs=1, max_model_len=max(contexts), progress=ProgressDisplay(False)
    )
    try:
        runner = engine.runner
        shape = runner.step_shape(options.tokens)
        [state] = [stage.state for stage in runner.executor.stages]
        key = ForwardKey(shape)
        program = runner.executor.compile(key)
        state.caches = jax.tree.map(random_values, state.caches)
        steps = {context: pack_step(step_at(context, options.tokens, runner), shape, {}) for context in contexts}

        def seconds(context: int) -> float:
            begin = time.perf_counter()
            key.run(program, state, steps[context])
            jax.block_until_ready((state.hidden, state.caches))
            return time.perf_counter() - begin

        times = {context: [] for context in contexts}
        for repeat in range(1 + options.repeats):
            for context in contexts:
                taken = seconds(context)
                if repeat:
                    times[context].append(taken)
        for context, of_context in times.items():
            texts = []
            for name, function in (("median", statistics.median), ("least", min)):
                taken, first = function(of_context), function(times[contexts[0]])
                texts.append(f"{name} {1000 * taken:9.2f} ms, {taken / first:.2f}x")
            print(f"context {context:6d}: {'; '.join(texts)}", flush=True)
        if options.profile:
            with jax.profiler.trace(options.profile):
                for _ in range(3):
                    seconds(contexts[-1])
    finally:
        engine.close()


def step_at(context: int, num_tokens: int, runner: Runner) -> SchedulerOutput:
    """A step of the last tokens of a sequence of `context` tokens, which holds the first blocks of every pool."""
    random = np.random.default_rng(0)
    token_ids = random.integers(1, runner.vocab_size, context).tolist()
    sequence = Sequence(SequenceId("step"), token_ids, SamplingParams(), frozenset(), context + 1, arrival=0)
    num_blocks, start = -(-context // BLOCK_SIZE), context - num_tokens
    # The pool of a window is small: its blocks are used again.
    sequence.block_tables = [
        BlockTable(array("i", (i % blocks for i in range(num_blocks)))) for blocks in runner.num_blocks.values()
    ]
    states = None if runner.num_state_slots is None else StateStep(0, 0)
    return SchedulerOutput(
        (ScheduledSequence(sequence, start, num_tokens, samples=True, state=states),), int(num_tokens == 1), ()
    )


def random_values(array: jax.Array) -> jax.Array:
    """Small normal values in an array's shape; codes of floats that an array stores as integers are small, too."""
    random = np.random.default_rng(0)
    noise = random.standard_normal(1 << 20, np.float32) * 0.5
    if array.dtype == jnp.uint16:  # bfloat16, as caches store it
        values = jnp.asarray(noise, jnp.bfloat16).view(jnp.uint16)
    else:
        values = jnp.asarray(noise).astype(array.dtype)
    return jnp.resize(values, array.shape)


if __name__ == "__main__":
    main()
