"""Compares engines of several devices whose weights were updated with fresh ones.

`python -m tests.engine.live_weights_script FOLDER OTHER`, two checkpoints of one mixture of experts.
"""

from __future__ import annotations

import sys

from jaxis import LLM, SamplingParams

PROMPTS = [list(range(5, 5 + 37)), list(range(60, 60 + 21)), [7, 8, 9]]
ARRANGEMENTS = (
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
)


def main(folder: str, other: str) -> None:
    """Prints each arrangement whose answers agree."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]

    for arrangement in ARRANGEMENTS:
        arguments = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory": "8MiB", "show_progress": False}
        with LLM(other, **arguments, **arrangement) as fresh:
            expected = answers(fresh)
        with LLM(folder, **arguments, **arrangement) as llm:
            assert answers(llm) != expected
            llm.update_weights(other)
            assert answers(llm) == expected
            llm.sleep(2)
            llm.wake_up()
            assert answers(llm) == expected
        print("same answers", arrangement)


if __name__ == "__main__":
    main(*sys.argv[1:])
