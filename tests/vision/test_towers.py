"""Towers of published checkpoints: every setting of theirs is known, and others are refused."""

import json

import pytest

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.image_encoder.encoder_memory import _config_of_tower
from jaxis.models.common.text_part import TextPart
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.registry import model_class_of
from tests.support.published_models import FOLDER


def towers():
    for path in sorted(FOLDER.glob("*.json")):
        config = HFConfig(json.loads(path.read_text()), source=path.name)
        try:
            model_class = model_class_of(config)
        except ConfigError:
            continue  # one that jaxis says it does not run
        # Of some, only the text's config is kept.
        if issubclass(model_class, TextPart) and model_class.tower is not None and config.get("vision_config"):
            yield pytest.param(config, model_class.tower, id=path.stem)


def made(config, tower_class, *, check_config):
    chosen = _config_of_tower(VllmConfig(ModelConfig(model="", hf_config=config)), config, None)
    return construct_abstractly(chosen, check_config=check_config, model_class=tower_class)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("config", "tower_class"), towers())
def test_a_tower_is_made_as_its_config_says(config, tower_class):
    tower = made(config, tower_class, check_config=True)
    num_parameters = sum(param.get_value().size for _, param in tower.named_parameters())
    # Published towers are of few sizes; Gemma 4 12B has none, but a product.
    assert 30e6 < num_parameters < 700e6
    assert (tower.patch_size, tower.merge_size) in {(14, 2), (16, 2), (16, 3), (48, 1)}


@pytest.mark.parametrize(
    ("name", "part", "key", "value"),
    [
        ("kimi-k2.5", "vision_config", "pos_emb_type", "learned"),
        ("kimi-k2.5", "vision_config", "init_pos_emb_width", 32),
        ("ministral-3-3b", "vision_config", "head_dim", 32),
        ("ministral-3-3b", "", "vision_feature_layer", -2),
        ("qwen3-vl-2b", "vision_config", "in_channels", 4),
    ],
)
def test_a_setting_that_a_tower_does_not_have_is_refused(name, part, key, value):
    values = json.loads((FOLDER / f"{name}.json").read_text())
    (values[part] if part else values)[key] = value
    config = HFConfig(values, source=name)
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        made(config, model_class_of(config).tower, check_config=False)
