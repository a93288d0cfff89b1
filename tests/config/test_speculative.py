"""`speculative_config`: vLLM's names, checked by name."""

from __future__ import annotations

import pytest

from jaxis import LLM
from jaxis.config.speculative import SpeculativeConfig, parse_speculative_config
from jaxis.errors import ConfigError


def test_defaults_and_names() -> None:
    assert parse_speculative_config(None) is None
    assert parse_speculative_config({"method": "ngram"}) == SpeculativeConfig("ngram")
    given = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0}
    assert parse_speculative_config(given) == SpeculativeConfig("suffix", 4, suffix_decoding_max_cached_requests=0)


def test_one_end_of_the_lookup_range_moves_the_other() -> None:
    config = parse_speculative_config({"method": "ngram", "prompt_lookup_max": 2})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 2)
    config = parse_speculative_config({"method": "ngram", "prompt_lookup_min": 30})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (30, 30)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "must be an object such as"),
        ({}, "method=None is not implemented: give ngram or suffix"),
        ({"method": "dflash"}, "method='dflash' is not implemented"),
        ({"method": "ngram", "num_tokens": 3}, "unknown key num_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be an integer from 1"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5 must be an integer"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 2},
            "min_token_prob=2 must be a number",
        ),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5 must not exceed"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(speculative_config=given, show_progress=False)
