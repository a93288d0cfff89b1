import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from jaxis.config.architecture import architectures_of, check_model_type
from jaxis.config.hf_config import HFConfig
from jaxis.config.reference import model_types_of
from jaxis.errors import ConfigError
from jaxis.models.registry import built_in_models, model_class_of, register_model


def config(architecture, model_type):
    return HFConfig({"architectures": [architecture], "model_type": model_type}, source="a/config.json")


@pytest.mark.parametrize("architecture", sorted(name for name in built_in_models() if model_types_of(name)))
def test_an_architecture_goes_with_the_references_model_type_and_no_other(architecture):
    types = {
        model_type
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if architecture in ([names] if isinstance(names, str) else names)
    }
    for model_type in ("llama", "mistral", "qwen3_moe", "gemma3_text"):
        if model_type in types:
            check_model_type(config(architecture, model_type), architecture)
        else:
            with pytest.raises(ConfigError, match=f"'{architecture}', whose model_type is .*model_type='{model_type}'"):
                check_model_type(config(architecture, model_type), architecture)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("DeepseekV3ForCausalLM", "kimi_k2"),
        ("Gemma3ForConditionalGeneration", "gemma3"),
        ("Llama4ForConditionalGeneration", "llama4"),
        ("Llama4ForCausalLM", "llama4_text"),
        ("LlamaForCausalLM", None),
        ("NeverHeardOf", "llama"),
    ],
)
def test_what_goes_together(architecture, model_type):
    check_model_type(config(architecture, model_type), architecture)


def test_the_error_says_what_the_model_type_stands_for_and_how_to_choose():
    with pytest.raises(ConfigError) as error:
        model_class_of(config("LlamaForCausalLM", "mistral"))
    assert str(error.value) == (
        "a/config.json has the architecture 'LlamaForCausalLM', whose model_type is 'llama' or 'internlm3' or "
        "'iquestcoder' or 'telechat3', but model_type='mistral', "
        "which is MistralForCausalLM: correct the file, or give hf_overrides={'model_type': 'llama'} if the weights "
        "are of that type"
    )


def test_a_registered_class_may_have_any_model_type(monkeypatch):
    monkeypatch.setattr("jaxis.models.registry._registered", {})

    class Mine:
        pass

    register_model("LlamaForCausalLM", Mine)
    assert model_class_of(config("LlamaForCausalLM", "mine")) is Mine


def test_without_architectures_the_model_type_says_it():
    assert architectures_of(HFConfig({"model_type": "llama"})) == ["LlamaForCausalLM"]
    assert architectures_of(HFConfig({"model_type": "llama4", "text_config": {}})) == ["Llama4ForConditionalGeneration"]
    assert architectures_of(HFConfig({"model_type": "gemma3", "architectures": []}))
    with pytest.raises(ConfigError, match="has no 'architectures'"):
        architectures_of(HFConfig({"model_type": "never_heard_of"}))


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [5], {"a": 1}])
def test_architectures_that_are_no_list_of_names(names):
    with pytest.raises(ConfigError, match="expected a list of names"):
        architectures_of(HFConfig({"architectures": names}))
