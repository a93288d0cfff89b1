"""Bounds of sampling parameters, and which temperature is greedy: defined once, and the same wherever they are used."""

import pytest

from jaxis import SamplingParams
from jaxis.errors import RequestError
from jaxis.inference.run import with_row_seed
from jaxis.jsonl.source import Row
from jaxis.sampling_params import INTEGER_BOUNDS, MIN_TEMPERATURE, NUMBER_BOUNDS
from jaxis.server.openai.fields import SamplingFields


@pytest.mark.parametrize("name", [*INTEGER_BOUNDS, *NUMBER_BOUNDS])
def test_parameters_are_taken_to_their_bounds_and_no_further(name):
    bounds = (INTEGER_BOUNDS | NUMBER_BOUNDS)[name]
    step = 1 if name in INTEGER_BOUNDS else 1e-6
    refused, taken = [bounds.low - step], [bounds.low]
    if bounds.high is not None:
        refused.append(bounds.high + step)
        taken.append(bounds.high)
    for value in taken:
        more = {"max_tokens": None} if name == "min_tokens" else {}
        without_limit = name == "thinking_token_budget" and value == -1
        assert getattr(SamplingParams(**{name: value}, **more), name) == (None if without_limit else value)
        if name in SamplingFields.model_fields:
            assert getattr(SamplingFields(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(RequestError, match=f"^{name}=.* must be {bounds}$"):
            SamplingParams(**{name: value})
        if name in SamplingFields.model_fields:
            with pytest.raises(ValueError, match=name):
                SamplingFields(**{name: value})


@pytest.mark.parametrize(
    ("temperature", "top_p", "greedy"),
    [(0, 1, True), (1e-6, 1, True), (MIN_TEMPERATURE, 1, False), (1.0, 1, False), (1.0, 0, True), (1.0, 1e-6, False)],
)
def test_greedy_means_the_same_to_parameters_and_batches(temperature, top_p, greedy):
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert params.greedy == greedy
    # A row of a batch needs a seed of its own only if something is drawn.
    assert (with_row_seed(params, "key", Row(0, {}, "r0")).seed is None) == greedy
