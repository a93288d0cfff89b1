"""Several layers that predict later tokens draft what transformers, SGLang or vLLM draft with them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.test_prediction_layers import load
from tests.support.chain_checkpoints import (
    FORMATS,
    chain_reference,
    nemotron_reference,
    write_chain_checkpoint,
    write_nemotron_checkpoint,
)
from tests.support.parity import prompt
from tests.support.prediction_checkpoints import (
    WholeDrafts,
    family,
    reference_chain_drafts,
    write_prediction_checkpoint,
)

# Largest difference of logits, as a part of the largest logit.
TOLERANCE = 2e-5
LENGTHS = (2, 3, 17, 50)


def check_drafts(found, expected):
    (drafts, logits), (expected_drafts, expected_logits) = found, expected
    assert drafts == expected_drafts
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=TOLERANCE * np.abs(expected_logits).max())


@pytest.mark.parametrize(
    ("name", "number"), [("GLM-4.5 MoE", 3), pytest.param("DeepSeek V3", 2, marks=pytest.mark.slow)]
)
def test_each_draft_of_numbered_layers_is_that_of_transformers(tmp_path, name, number):
    folder, _ = write_prediction_checkpoint(tmp_path, family(name), number)
    drafts_of = WholeDrafts(load(folder))
    for length in LENGTHS:
        check_drafts(drafts_of(prompt(length), number), reference_chain_drafts(folder, prompt(length)))


@pytest.mark.parametrize("name", list(FORMATS))
def test_each_draft_of_published_formats_is_that_of_sglang(tmp_path, name):
    folder = write_chain_checkpoint(tmp_path, name)
    drafts_of = WholeDrafts(load(folder))
    for length in LENGTHS:
        check_drafts(drafts_of(prompt(length), 3), chain_reference(folder, name, prompt(length)))


def test_a_block_of_two_layers_drafts_as_in_vllm(tmp_path):
    folder, larger = write_nemotron_checkpoint(tmp_path)
    drafts_of = WholeDrafts(load(folder))
    for length in LENGTHS:
        check_drafts(drafts_of(prompt(length), 3), nemotron_reference(folder, larger, prompt(length), 3))
