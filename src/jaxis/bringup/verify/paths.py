"""Checks that logits are the same on every path through the engine as for the whole sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxis.bringup.verify.compare import Gates, LogitsComparison, compare_logits
from jaxis.bringup.verify.step_logits import recorded_logits
from jaxis.llm import LLM
from jaxis.sampling_params import SamplingParams

CHUNK = 24  # tokens per step, for the paths that split prompts into chunks


@dataclass(frozen=True)
class PathCheck:
    """One path through the engine, compared with the same tokens run at once without a cache."""

    path: str
    comparison: LogitsComparison
    passed: bool


@dataclass
class _Computed:
    """The logits that the engine computed for a prompt: position -> logits [V], the latest if computed twice."""

    token_ids: list[int]
    logits: dict[int, np.ndarray] = field(default_factory=dict)


def check_paths(
    llm: LLM, prompt: Sequence[int], others: Sequence[Sequence[int]], num_tokens: int, gates: Gates
) -> list[PathCheck]:
    """Runs prompts of several blocks through an idle engine on each of its paths, and empties its prefix cache.

    No prompt is a prefix of another. `num_tokens` are generated after each.
    """
    engine = llm.engine
    checks = []

    def check(path: str, computed: Sequence[_Computed], first: int = 0, last: int | None = None) -> None:
        actual, expected = [], []
        for sequence in computed:
            whole = engine.runner.whole_logits(sequence.token_ids)
            positions = [p for p in sorted(sequence.logits) if p >= first and (last is None or p < last)]
            actual += [sequence.logits[position] for position in positions]
            expected += [whole[position] for position in positions]
        comparison = compare_logits(np.stack(actual), np.stack(expected))
        checks.append(PathCheck(path, comparison, comparison.passes(gates)))

    engine.reset()
    alone = _run(llm, [prompt], num_tokens)
    check("prefill", alone, last=len(prompt))
    check("decode", alone, first=len(prompt))

    halfway = len(prompt) // 2
    forked = [*prompt[: halfway + 1], *others[0][: len(prompt) - halfway]]
    # A recurrent state is kept where a prompt ends.
    _run(llm, [prompt[: halfway + 1]], num_tokens)
    check("prefix cache hit", _run(llm, [forked], num_tokens, cached=True))

    for path, prompts in ((f"prefill in chunks of {CHUNK}", [prompt]), ("batch, in chunks", [prompt, *others])):
        engine.reset()
        for scheduler in engine.scheduler.ranks:
            scheduler.max_num_batched_tokens = CHUNK
        check(path, _run(llm, prompts, num_tokens))
    engine.reset()
    check("batch", _run(llm, [prompt, *others], num_tokens))
    engine.reset()
    return checks


def _run(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, *, cached: bool = False) -> list[_Computed]:
    """Generates for the prompts together; `cached` asserts that some of each was in the prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with recorded_logits(llm) as steps:
        outputs = llm.generate([list(prompt) for prompt in prompts], params, progress=False)
    results = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert not cached or output.num_cached_tokens
        token_ids = [*prompt, *output.outputs[0].token_ids]
        rows = steps[tuple(prompt)]
        # The engine runs one step past the end; the last token itself is not run.
        results.append(_Computed(token_ids, {p: rows[p] for p in rows if p < len(token_ids) - 1}))
    return results
