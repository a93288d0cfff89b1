"""rope_config against the rope_parameters that transformers' own config classes make of the same config.json."""

import dataclasses
import json

import pytest
from transformers import AutoConfig

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import ROPE_TYPES, rope_config
from jaxis.errors import ConfigError
from tests.support.published_configs import LLAMA_2, LLAMA_3_2, MISTRAL, QWEN_2_5, QWEN_3

BASE = {key: value for key, value in LLAMA_2.items() if key != "rope_scaling"}
LLAMA3 = LLAMA_3_2["rope_scaling"]
FACTORS = {"short_factor": [1.0, 1.5] * 32, "long_factor": [2.0, 4.5] * 32}

CASES = {
    "no rope keys": BASE,
    "llama 2": LLAMA_2,
    "llama 3.2": LLAMA_3_2,
    "qwen 2.5": QWEN_2_5,
    "qwen 3": QWEN_3,
    "mistral": MISTRAL,
    "linear, old name of the type": {**BASE, "rope_scaling": {"type": "linear", "factor": 4}},
    "linear, both names": {**BASE, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    "dynamic": {**BASE, "rope_theta": 50000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "ntk": {**BASE, "rope_theta": 20000.0, "rope_scaling": {"type": "ntk", "factor": 4.0}},
    "yarn as Qwen documents it": {
        **QWEN_3,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn without the pretraining context": {**BASE, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn with everything": {
        **BASE,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2,
            "mscale": 0.707, "mscale_all_dim": 1.0, "attention_factor": 1.2, "truncate": False,
        },
    },
    "longrope with the pretraining context outside": {
        **BASE,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "factor": 32.0, **FACTORS},
    },
    "longrope with two pretraining contexts": {
        **BASE,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope", "factor": 8.0, "original_max_position_embeddings": 2048, "attention_factor": 1.25,
            **FACTORS,
        },
    },
    "transformers 5": {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "transformers 5, theta outside": {**BASE, "rope_theta": 7e4, "rope_parameters": {"rope_type": "default"}},
    "transformers 5, theta in both": {**BASE, "rope_theta": 1.0, "rope_parameters": {"rope_theta": 7e4}},
    "transformers 5, llama3": {**BASE, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "partial, outside": {**BASE, "partial_rotary_factor": 0.5},
    "partial, inside": {
        **BASE, "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "proportional": {**BASE, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
    "both styles": {
        **BASE,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_settings_are_those_that_transformers_reads(tmp_path, case):
    (tmp_path / "config.json").write_text(json.dumps(CASES[case]))
    oracle = AutoConfig.from_pretrained(tmp_path)
    oracle.standardize_rope_params()  # as transformers does once more before it computes the frequencies
    expected = dict(oracle.rope_parameters)
    found = rope_config(HFConfig.from_folder(tmp_path))
    assert found.rope_type == expected.pop("rope_type")
    assert found.theta == expected.pop("rope_theta")
    assert found.partial_rotary_factor == expected.pop("partial_rotary_factor", 1.0)
    expected.pop("type", None)
    for key, value in expected.items():
        assert getattr(found, key) == (tuple(value) if isinstance(value, list) else value), key
    assert found.max_position_embeddings == CASES[case]["max_position_embeddings"]


# By layer type: transformers' config class fills in what config.json leaves out.
NO_ROPE = {key: value for key, value in BASE.items() if "rope" not in key}
OLMO_3 = NO_ROPE | {"model_type": "olmo3", "sliding_window": 16}
GEMMA_3 = OLMO_3 | {"model_type": "gemma3_text", "head_dim": 128}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
LAYER_TYPE_CASES = {
    "olmo 3": (OLMO_3 | {"rope_theta": 500000, "rope_scaling": YARN}, {}),
    "olmo 3, not stretched": (OLMO_3 | {"rope_theta": 500000}, {}),
    "gemma 3": (
        GEMMA_3
        | {
            "rope_theta": 1e6,
            "rope_local_base_freq": 20000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {},
    ),
    "gemma 3, nothing said": (GEMMA_3, {"default_theta": 1e6, "default_local_theta": 1e4}),
    "gemma 4, nothing said": (GEMMA_3 | {"model_type": "gemma4_text"}, {}),
    "transformers 5": (
        GEMMA_3
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        {},
    ),
}


@pytest.mark.parametrize("case", LAYER_TYPE_CASES)
def test_settings_of_each_layer_type_are_those_that_transformers_reads(tmp_path, case):
    values, defaults = LAYER_TYPE_CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(values))
    oracle = AutoConfig.from_pretrained(tmp_path).rope_parameters
    config = HFConfig.from_folder(tmp_path)
    assert set(oracle) == {"full_attention", "sliding_attention"}
    for layer_type, expected in oracle.items():
        found = rope_config(config, layer_type, **defaults)
        assert found.rope_type == expected["rope_type"]
        assert found.theta == expected["rope_theta"]
        for key in ("factor", "attention_factor", "original_max_position_embeddings"):
            assert getattr(found, key) == expected.get(key), key
    assert [key for key in config.unread_keys() if "rope" in key] == []


def test_a_rope_that_differs_between_layers_is_refused_by_a_family_that_has_one():
    config = HFConfig(LAYER_TYPE_CASES["transformers 5"][0])
    with pytest.raises(ConfigError, match="differs from layer to layer"):
        rope_config(config)


def test_faults_of_one_layer_types_settings_name_it():
    config = HFConfig({"rope_parameters": {"full_attention": {"rope_type": "linear"}}})
    with pytest.raises(ConfigError, match=r"rope_parameters.full_attention .* factor None"):
        rope_config(config, "full_attention")


def test_a_familys_own_defaults_stand_in_for_what_config_json_leaves_out():
    found = rope_config(HFConfig({}), default_theta=5e5, default_partial_rotary_factor=0.5)
    assert (found.theta, found.partial_rotary_factor) == (5e5, 0.5)
    said = rope_config(HFConfig({"rope_theta": 1e4, "partial_rotary_factor": 0.25}), default_theta=5e5)
    assert (said.theta, said.partial_rotary_factor) == (1e4, 0.25)


@pytest.mark.parametrize("case", [case for case in CASES if case != "both styles"])
def test_no_rope_key_is_left_unread(case):
    config = HFConfig(CASES[case])
    rope_config(config)
    assert [key for key in config.unread_keys() if "rope" in key or "original" in key] == []


def test_rope_keys_that_the_type_does_not_use_stay_unread():
    config = HFConfig({"rope_parameters": {"rope_type": "linear", "factor": 2, "llama_4_scaling_beta": 0.1}})
    rope_config(config)
    assert config.unread_keys() == ["rope_parameters.llama_4_scaling_beta"]
    both = HFConfig(CASES["both styles"])
    rope_config(both)
    assert "rope_parameters" in both.unread_keys()


def test_missing_stretch_is_the_ratio_of_the_two_contexts():
    scaling = {"type": "longrope", "factor": None, **FACTORS}
    config = HFConfig(
        {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": scaling}
    )
    assert rope_config(config).factor == 32.0


def test_multimodal_sections_of_positions_are_no_difference_to_text():
    for scaling in (
        {"type": "mrope", "mrope_section": [16, 24, 24]},
        {"rope_type": "default", "type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    ):
        config = HFConfig({**BASE, "rope_theta": 5e6, "rope_scaling": scaling})
        read = rope_config(config)
        assert read.mrope_section == tuple(scaling["mrope_section"])
        of_text = dataclasses.replace(read, mrope_section=None, mrope_interleaved=False)
        assert of_text == rope_config(HFConfig({**BASE, "rope_theta": 5e6}))
        assert [key for key in config.unread_keys() if "rope" in key] == []


def test_a_layers_own_theta_stands_in_for_the_common_one():
    assert rope_config(HFConfig({**BASE, "rope_theta": 5e6}), theta=1e4).theta == 1e4
    with pytest.raises(ConfigError, match="rope_theta 0"):
        rope_config(HFConfig(BASE), theta=0)


def test_phi3_name_of_longrope():
    assert rope_config(HFConfig({**BASE, "rope_scaling": {"type": "su", **FACTORS}})).rope_type == "longrope"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "magic"}}, r"rope_scaling .*'magic', expected one of default, linear"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_type"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear', expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor None, expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor '2', expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor True"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor None"),
        ({"rope_scaling": {"type": "longrope", "factor": 2, "short_factor": [1]}}, "long_factor None"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": "8k"}},
            "original_max_position_embeddings '8k'",
        ),
        ({"rope_theta": -1}, "rope_theta -1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "from layer to layer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(values, message):
    with pytest.raises(ConfigError, match=message) as error:
        rope_config(HFConfig({"max_position_embeddings": 64, **values}, source="a/config.json"))
    assert "a/config.json" in str(error.value)


def test_every_rope_type_is_covered_here():
    assert {rope_config(HFConfig(values)).rope_type for values in CASES.values()} == set(ROPE_TYPES)
