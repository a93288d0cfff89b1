"""N-gram lookup where nothing is said about speculation: where it is on, and how it is turned off."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.drafting.make import is_on_by_default
from jaxis.errors import RequestError
from jaxis.kernels import native
from jaxis.kernels.paged_cache import CacheLayout, PagedCache

NATIVE, OTHER = (
    PagedCache(None, CacheLayout(kernels, 16, 2, (2, 1024), np.dtype(np.float32), (None, None)))
    for kernels in ("native", "any")
)


def on_by_default(*, is_native=True, devices=1, caches=(NATIVE, NATIVE), num_stages=1, num_state_slots=None) -> bool:
    stage = SimpleNamespace(
        is_native=is_native,
        context=SimpleNamespace(mesh=SimpleNamespace(size=devices)),
        plan=SimpleNamespace(structs=list(caches)),
    )
    executor = SimpleNamespace(stages=[stage])
    return is_on_by_default(SimpleNamespace(executor=executor, num_stages=num_stages, num_state_slots=num_state_slots))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"is_native": False}, False),
        ({"devices": 2}, False),
        ({"caches": [NATIVE, OTHER]}, False),
        ({"num_stages": 2}, False),
        ({"num_state_slots": 8}, False),
    ],
)
def test_it_is_on_where_it_changes_no_bit_and_takes_no_memory(changes: dict, expected: bool) -> None:
    assert on_by_default(**changes) == expected


@pytest.mark.skipif(not native.usable(), reason="is on with native kernels")
def test_it_is_on_unless_it_is_turned_off_and_answers_are_the_same() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    answers = []
    for config in (None, {"num_speculative_tokens": 0}):
        with LLM(speculative_config=config, max_model_len=128, kv_cache_memory="8MiB", show_progress=False) as llm:
            assert (llm.engine.speculation.counts is not None) == (config is None)
            [answer] = llm.generate("1 2 3 4 1 2 3 4 1 2 3", params)
            answers.append(
                (answer.outputs[0].token_ids, [[v.logprob for v in e.values()] for e in answer.outputs[0].logprobs])
            )
    assert answers[0] == answers[1]


@pytest.mark.skipif(not native.usable(), reason="is on with native kernels")
def test_nothing_is_compiled_for_drafts_before_they_would_have_saved_the_time_unless_they_are_asked_for() -> None:
    """A prompt that repeats itself all the while, for much less time than compiling takes."""
    repeating = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, allowed_token_ids=[7])
    num_started = {}
    for config in (None, {"method": "ngram"}):
        with LLM(speculative_config=config, max_model_len=128, kv_cache_memory="8MiB", show_progress=False) as llm:
            runner, started = llm.engine.runner, []
            can_draft = runner.can_draft
            runner.can_draft = lambda n, *, starts, c=can_draft, s=started: s.append(starts) or c(n, starts=starts)
            llm.generate("1 2 3 4", repeating)
            num_started[config is None] = sum(started)
    assert num_started[True] == 0
    assert num_started[False] > 0


def test_a_prediction_that_cannot_be_read_leaves_nothing_queued() -> None:
    sizes = {"max_model_len": 128, "kv_cache_memory": "8MiB", "show_progress": False}
    with LLM(speculative_config={"method": "ngram"}, **sizes) as llm:
        with pytest.raises(RequestError, match="lone surrogate"):
            llm.generate("1 2 3 4", SamplingParams(max_tokens=4, prediction="1 \ud800"))
        assert not llm.engine.has_unfinished
        assert not llm.engine.scheduler.has_unfinished
