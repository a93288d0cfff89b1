import json

import pytest

from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization_files import read_config
from jaxis.errors import CheckpointError, ConfigError

MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["a"]},
}
GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": True, "model_file_base_name": "m"}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}


def write(folder, **files):
    for name, values in files.items():
        (folder / f"{name}.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_a_config_alone_is_as_it_is(tmp_path):
    values = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    assert read_config(write(tmp_path, config=values)) == values


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("hf_quant_config", MODELOPT, {"quant_method": "modelopt", **MODELOPT["quantization"]}),
        (
            "hf_quant_config",
            {"quantization": {"quant_algo": "FP8"}},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        ("quantize_config", GPTQ, {"quant_method": "gptq", **GPTQ}),
        (
            "quant_config",
            AWQ,
            {"quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "gemm"},
        ),
    ],
)
def test_a_file_beside_config_json_is_its_quantization_config(tmp_path, name, content, expected):
    write(tmp_path, config={"model_type": "llama"}, **{name: content})
    assert read_config(tmp_path) == {"model_type": "llama", "quantization_config": expected}
    assert HFConfig.from_folder(tmp_path).read_object("quantization_config") == expected
    assert HFConfig.from_folder(tmp_path, {"quantization_config": None}).read_object("quantization_config") is None


def test_a_file_that_quantizes_only_the_cache_says_nothing_of_weights(tmp_path):
    only_cache = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert read_config(write(tmp_path, config={}, hf_quant_config=only_cache)) == {}


@pytest.mark.parametrize("name", ["quantize_config", "quant_config"])
def test_a_file_of_another_tool_by_the_same_name_says_nothing(tmp_path, name):
    assert read_config(write(tmp_path, config={}, **{name: {"codebook": "e8p", "resid_scale": -1}})) == {}


def test_what_config_json_says_itself_goes_first_and_lacks_nothing(tmp_path):
    own = {"quant_algo": "NVFP4", "ignore": ["b"], "config_groups": {}}
    write(tmp_path, config={"quantization_config": own}, hf_quant_config=MODELOPT)
    assert read_config(tmp_path) == {"quantization_config": {**own, "quant_method": "modelopt"}}
    own = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "checkpoint_format": "gptq_v2"}
    write(tmp_path, config={"quantization_config": own}, quantize_config=GPTQ)
    (tmp_path / "hf_quant_config.json").unlink()
    assert read_config(tmp_path) == {"quantization_config": own}


@pytest.mark.parametrize(
    ("own", "files", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 8},
            {"quantize_config": GPTQ},
            r"config\.json says bits=8 .*quantize_config\.json bits=4: remove the wrong one",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"hf_quant_config": MODELOPT},
            r"quant_algo='FP8' .*quant_algo='NVFP4'",
        ),
        (
            None,
            {"quantize_config": GPTQ, "quant_config": {**AWQ, "q_group_size": 64}},
            "group_size=128 .*group_size=64",
        ),
    ],
)
def test_descriptions_that_contradict_each_other_are_an_error_that_names_both(tmp_path, own, files, message):
    write(tmp_path, config={"quantization_config": own}, **files)
    with pytest.raises(ConfigError, match=message):
        HFConfig.from_folder(tmp_path)


def test_a_text_configs_quantization_is_the_checkpoints(tmp_path):
    inner = {"quant_method": "awq", "bits": 4}
    write(tmp_path, config={"text_config": {"hidden_size": 8, "quantization_config": inner}})
    assert read_config(tmp_path) == {"text_config": {"hidden_size": 8}, "quantization_config": inner}
    write(
        tmp_path,
        config={"text_config": {"quantization_config": inner}, "quantization_config": {**inner, "bits": 8}},
    )
    with pytest.raises(ConfigError, match=r"bits=8 .*text_config of .*bits=4"):
        read_config(tmp_path)


def test_the_older_key_of_compressed_tensors(tmp_path):
    older = {"format": "pack-quantized", "config_groups": {}}
    read = read_config(write(tmp_path, config={"compression_config": older}))
    assert read == {"quantization_config": {"quant_method": "compressed-tensors", **older}}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", CheckpointError, r"hf_quant_config\.json is not valid JSON"),
        ({"producer": {}}, CheckpointError, r"hf_quant_config\.json has no object 'quantization'"),
        ({"quantization": [1]}, CheckpointError, r"has no object 'quantization'"),
        ({"producer": {"name": "other"}, "quantization": {"quant_algo": "X"}}, ConfigError, "is by 'other'"),
    ],
)
def test_a_broken_file_beside_config_json_is_named(tmp_path, content, error, message):
    with pytest.raises(error, match=message):
        read_config(write(tmp_path, config={}, hf_quant_config=content))


def test_a_folder_without_config_json(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(write(tmp_path, hf_quant_config=MODELOPT))


@pytest.mark.parametrize(
    ("producer", "method"),
    [
        ({"name": "modelopt", "version": "0.39.0"}, "modelopt"),
        ({"name": "llm-compressor"}, "compressed-tensors"),
        ("AutoAWQ", "awq"),
        ({"name": "another tool"}, None),
        ({"name": 3}, None),
        (None, None),
    ],
)
def test_a_quantization_without_a_method_is_its_producers(tmp_path, producer, method):
    own = {"quant_algo": "FP8", "producer": producer}
    write(tmp_path, config={"quantization_config": own})
    named = {} if method is None else {"quant_method": method}
    assert read_config(tmp_path) == {"quantization_config": own | named}
    own["quant_method"] = "gptq"
    write(tmp_path, config={"quantization_config": own})
    assert read_config(tmp_path) == {"quantization_config": own}, "what it says itself goes first"
