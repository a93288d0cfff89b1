import copy
import json
import pickle

import pytest
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from jaxis.config.generation_config import load_generation_defaults
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.config.usual_keys import USUAL_KEYS
from jaxis.errors import CheckpointError, ConfigError
from tests.support.published_configs import LLAMA_2, LLAMA_3_2, MISTRAL, QWEN_2_5, QWEN_3

# What a decoder of these families is made of: every other key of their configs must be neutral.
DECODER_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
LLAMA_KEYS = (*DECODER_KEYS, "head_dim", "attention_bias", "mlp_bias")
QWEN_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
FAMILIES = {
    "llama 2": (LLAMA_2, LlamaConfig, LLAMA_KEYS),
    "llama 3.2": (LLAMA_3_2, LlamaConfig, LLAMA_KEYS),
    "qwen 2.5": (QWEN_2_5, Qwen2Config, (*DECODER_KEYS, *QWEN_KEYS)),
    "qwen 3": (QWEN_3, Qwen3Config, (*DECODER_KEYS, *QWEN_KEYS, "head_dim", "attention_bias")),
    "mistral": (MISTRAL, MistralConfig, (*DECODER_KEYS, "head_dim", "sliding_window")),
}


def write(folder, values, name="config.json"):
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_reads_by_attribute_item_and_get():
    config = HFConfig({"hidden_size": 8, "text_config": {"vocab_size": 5, "layer_types": ["full_attention"]}})
    assert config.hidden_size == config["hidden_size"] == config.get("hidden_size") == 8
    assert config.text_config.vocab_size == config["text_config"]["vocab_size"] == 5
    assert config.text_config.layer_types == ["full_attention"]
    assert dict(config.text_config) == {"vocab_size": 5, "layer_types": ["full_attention"]}


def test_a_required_key_that_is_null_counts_as_absent():
    config = HFConfig({"sliding_window": None})
    assert "sliding_window" not in config
    assert getattr(config, "sliding_window", "default") == "default"
    assert list(config) == []
    assert config.to_dict() == {"sliding_window": None}


def test_null_is_null_where_no_reference_says_otherwise():
    config = HFConfig({"model_type": "a_plugin", "soft_cap": None, "bias": None, "rope_scaling": {"beta_fast": None}})
    assert config.get("soft_cap", 15.0) is None
    assert config.get("other", 15.0) == 15.0
    assert config.get("bias", False) is False
    assert config.rope_scaling.get("beta_fast", 32) == 32
    with pytest.raises(ConfigError, match="soft_cap=None, of which only True"):
        config.expect("soft_cap", True)


@pytest.mark.parametrize(
    ("model_type", "key", "default"),
    [
        ("gemma2", "final_logit_softcapping", 30.0),
        ("falcon", "multi_query", True),
        ("granite", "logits_scaling", 1.0),
        ("llama", "num_key_value_heads", 4),
        ("internlm3", "head_dim", 16),
        ("llama", "rms_norm_eps", 1e-6),
        ("gpt2", "layer_norm_eps", 1e-5),
        ("qwen3_moe", "norm_topk_prob", True),
    ],
)
def test_null_is_what_transformers_makes_of_it(model_type, key, default):
    own = {usual: name for name, usual in USUAL_KEYS.get(model_type, {}).items()}.get(key, key)
    config = HFConfig({"model_type": model_type, own: None})
    config_class = CONFIG_MAPPING[{"internlm3": "llama"}.get(model_type, model_type)]
    try:
        theirs = getattr(config_class.from_dict({own: None}), own)
    except Exception:  # refused, by each class in its own way
        theirs = "the default"
    none = False if default is True else None
    assert config.get(key, default) == (none if theirs is None else default)


def test_a_value_that_a_model_does_not_implement_is_an_error_that_names_it():
    config = HFConfig({"use_bias": True, "norm_type": "layer_norm"}, source="a/config.json")
    config.expect("norm_type", "layer_norm")
    config.expect("absent", False)
    with pytest.raises(ConfigError, match=r"a/config\.json has use_bias=True, of which only False or 'no' is"):
        config.expect("use_bias", False, "no")
    assert config.unread_keys() == []


def test_missing_key_is_an_error_that_names_key_and_file(tmp_path):
    config = HFConfig.from_folder(write(tmp_path, {"text_config": {}, "head_dim": None}))
    for read in (lambda: config.hidden_size, lambda: config["hidden_size"]):
        with pytest.raises(ConfigError) as error:
            read()
        assert str(tmp_path / "config.json") in str(error.value)
        assert "has no 'hidden_size'" in str(error.value)
    with pytest.raises(ConfigError, match=r"no 'text_config\.vocab_size'"):
        _ = config.text_config.vocab_size
    with pytest.raises(ConfigError, match="no 'head_dim'"):
        _ = config.head_dim
    assert not hasattr(config, "hidden_size")


def test_cannot_be_changed():
    values = {"layers": [1], "nested": {"a": 1}}
    config = HFConfig(values)
    with pytest.raises(AttributeError):
        config.hidden_size = 3
    with pytest.raises(TypeError):
        config["hidden_size"] = 3
    values["layers"].append(2)
    config.to_dict()["nested"]["a"] = 2
    assert config.layers == [1]
    assert config.nested.a == 1


def test_copies_and_pickles():
    config = HFConfig({"a": 1, "nested": {"b": 2}})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin.nested.b == 2
        assert twin.to_dict() == config.to_dict()


def test_unread_keys_are_those_that_no_code_read():
    config = HFConfig({"hidden_size": 8, "logit_scale": 2.0, "odd": 1, "torch_dtype": "bfloat16", "off": None})
    assert config.unread_keys() == ["hidden_size", "logit_scale", "odd"]
    assert "odd" in config
    assert list(config)
    config.to_dict()
    assert config.unread_keys() == ["hidden_size", "logit_scale", "odd"], "looking for a key is not reading it"
    _ = config.hidden_size
    config.get("logit_scale")
    assert config.unread_keys() == ["odd"]


def test_unread_keys_follow_nested_objects_that_were_read():
    config = HFConfig({"text_config": {"hidden_size": 8, "odd": {"a": 1, "b": 2}, "model_type": "x"}})
    assert config.unread_keys() == ["text_config"]
    _ = config.text_config.hidden_size
    assert config.unread_keys() == ["text_config.odd"]
    config.text_config.get("odd", HFConfig({})).get("a")
    assert config.unread_keys() == ["text_config.odd.b"], "comparing with a default is not reading it"


def test_key_uses_tell_what_was_made_of_each_key():
    config = HFConfig({"a": 1, "b": 2, "c": 3, "rope": {"d": 4, "e": 5}, "other": {"f": 6}, "off": None, "dtype": "x"})
    assert config["a"] == 1
    assert config.get("b", 2) == 2  # what the reader assumes anyway
    assert config.get("c", 2) == 3
    assert config.get("rope").get("d", 4) == 4
    uses = {use.key: (use.value, use.use) for use in config.key_uses()}
    assert uses == {
        "a": (1, "used"),
        "b": (2, "default"),
        "c": (3, "used"),
        "rope.d": (4, "default"),
        "rope.e": (5, "unread"),
        "other": ({"f": 6}, "unread"),
        "off": (None, "default"),
        "dtype": ("x", "neutral"),
    }
    config.get("b", 7)  # another reader assumes another value
    assert {use.key: use.use for use in config.key_uses()}["b"] == "used"


def test_an_ignored_key_is_known_and_makes_no_difference():
    config = HFConfig({"layer_switch": 4, "vision_config": {"depth": 2, "parts": {"a": 1}}, "odd": 1})
    for key in ("layer_switch", "vision_config", "absent"):
        config.ignore(key, because="it is about something else")
    assert config.unread_keys() == ["odd"]
    uses = {use.key: use.use for use in config.key_uses()}
    assert uses == {"layer_switch": "neutral", "vision_config": "neutral", "odd": "unread"}


def test_a_key_that_some_layers_ignore_and_others_use_is_used():
    for readers in (["ignore", "read"], ["read", "ignore"]):
        config = HFConfig({"intermediate_size": 24})
        for reader in readers:
            if reader == "ignore":
                config.ignore("intermediate_size", because="sparse layers do not have it")
            else:
                assert config["intermediate_size"] == 24
        assert [use.use for use in config.key_uses()] == ["used"]


def test_ignoring_a_key_needs_a_reason():
    with pytest.raises(ValueError, match="'layer_switch' is ignored without a reason"):
        HFConfig({}).ignore("layer_switch", because="")


def test_keys_that_are_neutral_at_one_value_are_reported_at_another():
    assert HFConfig({"add_cross_attention": False, "is_encoder_decoder": False, "pruned_heads": {}}).unread_keys() == []
    assert HFConfig({"is_encoder_decoder": True, "pruned_heads": {"0": [1]}}).unread_keys() == [
        "is_encoder_decoder",
        "pruned_heads",
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", ["published", "saved by transformers 5"])
def test_only_architecture_keys_of_real_configs_need_reading(tmp_path, family, style):
    published, hf_class, keys = FAMILIES[family]
    write(tmp_path, published)
    if style != "published":
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
        assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    config = HFConfig.from_folder(tmp_path)
    assert set(DECODER_KEYS) <= set(config.unread_keys())
    for key in keys:
        config.get(key)
    rope_config(config)
    assert config.unread_keys() == []
    oracle = hf_class.from_pretrained(tmp_path)
    for key in DECODER_KEYS:
        assert config[key] == getattr(oracle, key)


@pytest.mark.parametrize("hf_class", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_defaults_of_transformers_5_need_no_more_keys(tmp_path, hf_class):
    hf_class(architectures=["X"], dtype="bfloat16").save_pretrained(tmp_path)
    config = HFConfig.from_folder(tmp_path)
    for key in (*LLAMA_KEYS, *QWEN_KEYS):
        config.get(key)
    rope_config(config)
    assert config.unread_keys() == []


def test_overrides_set_add_and_remove_keys(tmp_path):
    write(tmp_path, {"a": 1, "odd": 5, "nested": {"b": 2, "c": 3}, "null": None})
    config = HFConfig.from_folder(
        tmp_path, {"a": 10, "new": 7, "odd": None, "nested.b": None, "nested.d": 4, "null.x": 1}
    )
    assert config.to_dict() == {
        "a": 10,
        "odd": None,
        "nested": {"b": None, "c": 3, "d": 4},
        "null": {"x": 1},
        "new": 7,
    }
    assert "odd" not in config.unread_keys()
    with pytest.raises(ConfigError, match=r"override 'a.b' goes through 'a'"):
        HFConfig.from_folder(tmp_path, {"a.b": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "must be a JSON object"), ('{"a": 1, "a": 2}', "'a' appears twice")],
)
def test_broken_config_is_named(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=message) as error:
        HFConfig.from_folder(write(tmp_path, text))
    assert str(tmp_path / "config.json") in str(error.value)


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        HFConfig.from_folder(tmp_path)


def test_generation_defaults_are_what_transformers_saved(tmp_path):
    assert load_generation_defaults(tmp_path) == {}
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 6]}
    GenerationConfig(**settings, repetition_penalty=1.1, bos_token_id=3).save_pretrained(tmp_path)
    assert load_generation_defaults(tmp_path) == {**settings, "repetition_penalty": 1.1, "bos_token_id": 3}
    write(tmp_path, {"eos_token_id": 2, "temperature": None, "_from_model_config": True}, "generation_config.json")
    assert load_generation_defaults(tmp_path) == {"eos_token_id": 2}


@pytest.mark.parametrize(
    "values",
    [
        "{",
        {"temperature": "0.6"},
        {"eos_token_id": [1, None]},
        {"stop_strings": [1]},
        {"top_k": True},
        {"do_sample": 1},
    ],
)
def test_broken_generation_defaults_are_named(tmp_path, values):
    write(tmp_path, values, "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "adapter_config.json",
            r"it is an adapter \(LoRA\), not a model: give its base model, and this folder as the adapter",
        ),
        ("model_index.json", r"it is a pipeline for images \(diffusers\), not a language model"),
        ("tokenizer.json", "has no config.json: give the folder of a checkpoint in Hugging Face format"),
    ],
)
def test_a_folder_without_config_says_what_it_is(tmp_path, name, message):
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        HFConfig.from_folder(tmp_path)


def test_keys_are_called_what_the_file_calls_them():
    config = HFConfig(
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "activation_function": "relu"}, source="a file"
    )
    assert config["hidden_size"] == 64
    with pytest.raises(ConfigError, match="a file has activation_function='relu', of which only 'gelu' is supported"):
        config.expect("hidden_act", "gelu")
    with pytest.raises(ConfigError, match="a file has no 'n_head', which"):
        config["num_attention_heads"]
    assert {use.key: use.use for use in config.key_uses()} == {
        "model_type": "neutral",
        "n_embd": "used",
        "n_layer": "unread",
        "activation_function": "used",
    }
    assert HFConfig({"model_type": "gpt2", "hidden_act": "relu"}).key_uses()[-1].key == "hidden_act"
