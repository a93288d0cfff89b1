"""EAGLE-3 heads of both kinds of files draft what their definition says."""

from __future__ import annotations

import numpy as np
import pytest

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.draft_loader import load_eagle3
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.eagle_checkpoints import reference_drafts, write_head, write_target
from tests.support.parity import prompt
from tests.support.prediction_checkpoints import WholeDrafts

NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def config_of(folder):
    return VllmConfig(ModelConfig(str(folder), HFConfig.from_folder(folder), max_model_len=128))


def load(target, head):
    mesh = make_mesh()
    model = load_model(config_of(target), mesh)
    load_eagle3(model, config_of(head), mesh)
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["SpecForge", "speculators"])
@pytest.mark.parametrize(
    "settings", [{"layers": (1, 2, 5)}, {"layers": (0, 4, 5), "norm_before_residual": True}], ids=str
)
def test_drafts_are_those_of_the_definition(target, tmp_path, form, settings):
    head = write_head(tmp_path, form, **settings)
    drafts_of = WholeDrafts(load(target, head))
    for length in (2, 40):
        tokens = prompt(length)
        expected, expected_logits = reference_drafts(target, head, tokens, NUM_DRAFTS, settings["layers"])
        drafts, logits = drafts_of(tokens, NUM_DRAFTS)
        assert drafts == expected
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=2e-5 * np.abs(expected_logits).max())


def test_a_head_of_another_model_is_refused(target, tmp_path):
    head = write_head(tmp_path, "SpecForge", layers=(2, 16, 29))
    with pytest.raises(ConfigError, match="states that enter layers 2, 16, 29, expected 3 of the model's 6"):
        load(target, head)
