"""Every field of the parameters is applied, or refused by name."""

import dataclasses
import enum

import pytest

from jaxis.engine.model_params import to_llm_arguments
from jaxis.errors import ConfigError
from jaxis.inference import GenerationParams, GuidedDecodingParams, InferenceConfig, ModelParams
from jaxis.inference.generation_params import to_sampling_params
from jaxis.inference.template_arguments import template_arguments
from tests.support.places import REPOSITORY


def test_generation_fields_reach_the_sampler():
    params = GenerationParams(
        max_new_tokens=7,
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        stop_strings=["a"],
        stop_token_ids=[5],
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={"4": 2},
        skip_special_tokens=False,
    )
    sampling = to_sampling_params(params)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.min_p) == (7, 0.5, 0.9, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (3, ["a"], [5])
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, 0.3)
    assert (sampling.logit_bias, sampling.skip_special_tokens) == ({4: 2}, False)


def test_model_fields_reach_the_engine():
    params = ModelParams(
        model_max_length=64,
        torch_dtype_str="bf16",
        load_pretrained_weights=False,
        model_kwargs={"load_in_4bit": True, "max_num_seqs": 2},
    )
    assert to_llm_arguments(params) == {
        "dtype": "bfloat16",
        "max_model_len": 64,
        "load_format": "dummy",
        "quantization": "int4",
        "max_num_seqs": 2,
    }


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_new_tokens": 0}, "generation.max_new_tokens=0"),
        ({"max_new_tokens": 1.5}, "generation.max_new_tokens=1.5"),
        ({"temperature": -1}, "generation.temperature=-1"),
        ({"top_p": 2.0}, "generation.top_p"),
        ({"stop_strings": [""]}, "generation.stop_strings="),
        ({"logit_bias": {"the": 1}}, "generation.logit_bias"),
        ({"prompt_cache_ttl": "1h"}, "generation.prompt_cache_ttl"),
        ({"num_beams": 2}, "generation.num_beams=2"),
        ({"num_beams": 0}, "generation.num_beams=0"),
        ({"stream": True}, "generation.stream=True"),
        ({"use_sampling": True}, "generation.use_sampling"),
        ({"exclude_prompt_from_response": False}, "generation.exclude_prompt"),
        ({"parallel_tool_calls": False}, "generation.parallel_tool_calls"),
        ({"tool_choice": "required"}, "generation.tool_choice"),
        ({"tools": "add"}, "generation.tools"),
        ({"temprature": 1}, "generation.temprature"),
        ({"guided_decoding": {"regex": "a", "choice": ["a"]}}, "one of json, regex and choice"),
    ],
)
def test_generation_fields_that_cannot_be_honoured_are_named(values, named):
    with pytest.raises(ConfigError, match=named):
        GenerationParams.of(values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"adapter_model": 7}, "model.adapter_model"),
        ({"adapter_trainable": True}, "model.adapter_trainable"),
        ({"tool_call_parser": "telepathy"}, "model.tool_call_parser"),
        ({"chat_template_kwargs": ["x"]}, "model.chat_template_kwargs"),
        ({"tokenizer_name": "other"}, "model.tokenizer_name"),
        ({"tokenizer_kwargs": {"use_fast": True}}, "model.tokenizer_kwargs"),
        ({"shard_for_eval": True}, "model.shard_for_eval"),
        ({"model_name": 7}, "model.model_name=7"),
        ({"torch_dtype_str": "float64"}, "model.torch_dtype_str='float64'"),
        ({"model_kwargs": {"rope": 1}}, "model.model_kwargs.rope"),
        ({"model_kwargs": {"load_in_8bit": True, "quantization": "int4"}}, "load_in_8bit"),
    ],
)
def test_model_fields_that_cannot_be_honoured_are_named(values, named):
    with pytest.raises(ConfigError, match=named):
        to_llm_arguments(ModelParams.of(values))


@pytest.mark.parametrize(
    ("values", "named"),
    [({"engine": "VLLM"}, "engine"), ({"remote_params": {"api_url": "http://x"}}, "remote_params"), ({"n": 1}, "n")],
)
def test_config_fields_that_cannot_be_honoured_are_named(values, named):
    with pytest.raises(ConfigError, match=f"config.{named}"):
        InferenceConfig.of(values)


def test_what_has_no_effect_is_noted():
    config = InferenceConfig.of({"model": {"attn_implementation": "sdpa"}, "generation": {"batch_size": 8}})
    assert [note.split()[0] for note in config.notes()] == ["model.attn_implementation", "generation.batch_size"]
    assert InferenceConfig().notes() == []


def test_objects_with_the_same_fields_are_taken():
    class Engine(enum.Enum):
        JAX = "JAX"

    @dataclasses.dataclass
    class Guided:
        json: object = None
        choice: list | None = None

    @dataclasses.dataclass
    class Generation:
        max_new_tokens: int = 9
        seed: object = "???"
        stop_strings: list | None = None
        of_another_engine: int = 1

    @dataclasses.dataclass
    class Config:
        generation: Generation = dataclasses.field(default_factory=Generation)
        engine: Engine = Engine.JAX

    assert InferenceConfig.of(Config()).generation.max_new_tokens == 9
    assert GuidedDecodingParams.of(Guided(choice=["a"])).choice == ["a"]
    with pytest.raises(ConfigError, match="of_another_engine"):
        InferenceConfig.of(Config(Generation(of_another_engine=2)))


def test_yaml_is_read_with_numbers_as_people_write_them(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("generation:\n  temperature: 1e-1\n  top_p: .9\nmodel:\n  model_name: a/b\nengine: JAX\n")
    config = InferenceConfig.from_yaml(path)
    assert (config.generation.temperature, config.generation.top_p, config.model.model_name) == (0.1, 0.9, "a/b")


@pytest.mark.parametrize(
    ("text", "named"), [("a: [", "not YAML"), ("- 1", "no configuration"), (None, "cannot be read")]
)
def test_files_that_are_no_configuration_are_named(tmp_path, text, named):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        InferenceConfig.from_yaml(path)


def test_templates_are_files_sources_or_names(tmp_path, llm):
    path = tmp_path / "template.jinja"
    path.write_text("{{ reasoning_effort }}")
    generation = GenerationParams(reasoning_effort="low")
    params = ModelParams(chat_template=str(path), chat_template_kwargs={"enable_thinking": False})
    assert template_arguments(params, generation, llm.tokenizer) == {
        "chat_template": "{{ reasoning_effort }}",
        "reasoning_effort": "low",
        "enable_thinking": False,
    }
    with pytest.raises(ConfigError, match="must not set 'tools'"):
        template_arguments(ModelParams(chat_template_kwargs={"tools": []}), GenerationParams(), llm.tokenizer)
    with pytest.raises(ConfigError, match="reasoning_effort"):
        template_arguments(ModelParams(chat_template="{{ messages }}"), generation, llm.tokenizer)
    with pytest.raises(ConfigError, match="chat_template='no_such'"):
        template_arguments(ModelParams(chat_template="no_such"), GenerationParams(), llm.tokenizer)


def test_the_page_names_every_field():
    page = (REPOSITORY / "docs" / "inference.md").read_text()
    for params in (ModelParams, GenerationParams, GuidedDecodingParams, InferenceConfig):
        for field in dataclasses.fields(params):
            assert f"`{field.name}`" in page or f"`{field.name}:`" in page, field.name
