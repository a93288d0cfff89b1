"""Gemma 3 as published from 4B parameters on: with a vision model, and a short `text_config`."""

import transformers

from jaxis.config.hf_config import HFConfig
from jaxis.config.usual_keys import CONFIG_DEFAULTS, with_defaults


def test_what_a_published_text_config_leaves_out_is_what_transformers_has():
    expected = transformers.Gemma3TextConfig()
    for key, value in CONFIG_DEFAULTS["gemma3_text"].items():
        assert getattr(expected, key) == value, key
    sparse = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = HFConfig({"model_type": "gemma3", "text_config": sparse}).get_text_config()
    assert (config["hidden_size"], config["vocab_size"], config["num_attention_heads"]) == (2560, 262_208, 8)
    assert with_defaults({"model_type": "llama"}) == {"model_type": "llama"}
