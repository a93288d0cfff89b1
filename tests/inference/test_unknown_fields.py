"""Fields that a configuration does not have: the error names the one that is meant."""

from __future__ import annotations

import pytest

from jaxis.errors import ConfigError
from jaxis.inference.inference_config import InferenceConfig
from jaxis.training.config import TrainConfig

_DATA = {"train": {"datasets": [{"dataset_path": "rows.jsonl"}]}}
CASES = {
    "another section's": (TrainConfig, "training", "peft_save_mode", "did you mean peft.peft_save_mode?"),
    "at the top": (TrainConfig, None, "chat_template", "did you mean model.chat_template?"),
    "misspelled": (TrainConfig, "training", "max_stepz", "did you mean training.max_steps?"),
    "misspelled in another section": (TrainConfig, "training", "peft_savemode", "did you mean peft.peft_save_mode?"),
    "of batches of answers": (InferenceConfig, "model", "temperature", "did you mean generation.temperature?"),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_field_that_is_meant_is_named(kind):
    config, section, field, hint = CASES[kind]
    values = {"data": _DATA} if config is TrainConfig else {}
    values |= {field: 1} if section is None else {section: {field: 1}}
    with pytest.raises(ConfigError, match="is not a known field") as caught:
        config.of(values)
    assert hint in str(caught.value)
    assert len(str(caught.value)) < 120


def test_of_a_field_like_no_other_a_few_are_named():
    with pytest.raises(ConfigError, match="the nearest ones are") as caught:
        TrainConfig.of({"data": _DATA, "training": {"zzz": 1}})
    assert str(caught.value).count(",") == 4
