"""`jaxis quantize`, and quantization as an option of the other commands."""

import json

import pytest

from jaxis import SamplingParams


def test_writes_a_folder_that_answers(run_jaxis, checkpoint, tmp_path, start_llm):
    result = run_jaxis("quantize", checkpoint(), tmp_path / "q", "--quantization", "int4")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr == f"{tmp_path / 'q'}: 0.1 MB of weights\n"
    with start_llm(tmp_path / "q") as llm:
        assert llm.generate("the cat", SamplingParams(max_tokens=3))[0].finished


def test_int8_is_the_default(invoke, checkpoint, tmp_path):
    assert invoke("quantize", checkpoint(), tmp_path / "q").exit_code == 0
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"


def test_rules_as_json(invoke, checkpoint, tmp_path):
    rules = {"quantization": {"qwix": {"rules": [{"module_path": ".*q_proj", "weight_qtype": "int8"}]}}}
    assert invoke("quantize", checkpoint(), tmp_path / "q", "--additional-config", json.dumps(rules)).exit_code == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "model.layers.0.self_attn.k_proj" in config["quantization_config"]["ignore"]


def test_a_mistake_is_one_line(invoke, checkpoint, tmp_path):
    result = invoke("quantize", checkpoint(), tmp_path / "q", "--quantization", "int5")
    assert result.exit_code == 1
    assert result.stderr.startswith("jaxis: error: quantization='int5' is neither one of none, int8, int4")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("generate", "hello"), ("chat",)])
def test_options_reach_the_engine(invoke, tmp_path, command):
    rules = {"quantization": {"qwix": {"rules": [{"module_path": ".*"}]}}}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    invoke(*command, "--quantization", "int8", stdin="")
    invoke(*command, "--additional-config", tmp_path / "rules.json", stdin="")
    assert invoke.opened[0][1]["quantization"] == "int8"
    assert invoke.opened[1][1]["additional_config"] == rules


def test_additional_config_that_is_no_object_is_wrong_usage(invoke):
    result = invoke("generate", "hello", "--additional-config", "[1]")
    assert result.exit_code == 2
    assert "--additional-config" in result.stderr
