"""`speculative_config`: vLLM's names, checked by name."""

from __future__ import annotations

import pytest

from jaxis import LLM
from jaxis.config.speculative import NO_SPECULATION, SpeculativeConfig, parse_speculative_config
from jaxis.errors import ConfigError


@pytest.mark.parametrize("name", ["deepseek_mtp", "step3p5_mtp", "mimo_v2_mtp", "nemotron_h_mtp"])
def test_names_of_layers_by_family_mean_the_same(name: str) -> None:
    assert parse_speculative_config({"method": name}) == SpeculativeConfig("mtp", 3)


def test_dspark_is_another_name_with_a_block_of_drafts() -> None:
    assert parse_speculative_config({"method": "dspark"}) == SpeculativeConfig("mtp", 5)


@pytest.mark.parametrize("others", [{}, {"method": "mtp"}, {"method": "draft_model", "model": "folder"}])
def test_no_tokens_turn_it_off_and_load_nothing(others: dict[str, str]) -> None:
    config = parse_speculative_config({"num_speculative_tokens": 0, **others})
    assert config == NO_SPECULATION
    assert config.model is None


def test_most_drafts_by_the_number_of_sequences() -> None:
    """Ranges as vLLM reads them: ends included, gaps and what is beyond the last as before."""
    given = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[9, 16, 3], [1, 4, 7], [32, 64, 0]]}
    config = parse_speculative_config(given)
    assert config.num_speculative_tokens == 7
    sizes = {1: 7, 4: 7, 5: 7, 8: 7, 9: 3, 16: 3, 31: 3, 32: 0, 64: 0, 1000: 0}
    assert {size: config.most_drafts(size) for size in sizes} == sizes
    assert parse_speculative_config({**given, "num_speculative_tokens": 5}).most_drafts(1) == 5
    assert SpeculativeConfig("ngram", 4).most_drafts(64) == 4


@pytest.mark.parametrize(
    "entries",
    [[], {}, "[[1, 2, 3]]", [[2, 4, 1]], [[1, 4]], [[1, 4, 2], [4, 8, 1]], [[1, 4, -1]], [[4, 1, 2]], [[1, 2.5, 3]]],
)
def test_ranges_of_numbers_of_sequences_are_checked(entries: object) -> None:
    with pytest.raises(ConfigError, match=r"per_batch_size=.* must be a list such as \[\[1, 4, 7\], \[5, 16, 3\]\]"):
        parse_speculative_config({"method": "ngram", "num_speculative_tokens_per_batch_size": entries})


def test_one_end_of_the_lookup_range_moves_the_other() -> None:
    config = parse_speculative_config({"method": "ngram", "prompt_lookup_max": 2})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 2)
    config = parse_speculative_config({"method": "ngram", "prompt_lookup_min": 30})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (30, 30)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "speculative_config='ngram' must be a dict"),
        ({}, "method=None is not implemented: give ngram or suffix"),
        ({"method": "medusa"}, "method='medusa' is not implemented"),
        ({"method": "ngram", "num_tokens": 3}, "unknown key 'num_tokens'; known: method, "),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens=-1 must be an integer from 0"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5 must be an integer"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 2},
            "min_token_prob=2 must be a number",
        ),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 must be the model's, 1"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5 must not exceed"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(speculative_config=given, show_progress=False)
