"""`jaxis quantize`, and quantization as an option of the other commands."""

import json
import re

import pytest

from jaxis import SamplingParams
from jaxis.engine.opened_model import EMBEDDED_MODEL


def test_writes_a_folder_that_answers(invoke, checkpoint, tmp_path, start_llm):
    result = invoke("quantize", checkpoint(), tmp_path / "q", "--quantization", "int4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    sizes, advice = result.stderr.splitlines()
    assert re.fullmatch(rf"{tmp_path / 'q'}: [\d.]+ MB of files -> 0\.1 MB", sizes)
    assert advice == f"to try it: jaxis chat {tmp_path / 'q'}"
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
    assert result.exit_code == 3
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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("The capital of Italy is Rome. Seven times eight is fifty-six. " * 8)
    return path


def table_of(output):
    """The table that --evaluate prints: name -> the last column."""
    first, header, *rows = output.strip().split("\n")
    assert first.endswith(" predicted tokens")
    assert header.split() == ["source", "quantized"]
    return {row[:20].strip(): row[20:].split() for row in rows}


def test_evaluate_without_a_destination_writes_nothing(run_jaxis, text, tmp_path):
    result = run_jaxis("quantize", EMBEDDED_MODEL, "--quantization", "int4", "--evaluate", text)
    assert result.returncode == 0, result.stderr
    table = table_of(result.stdout)
    assert list(table) == ["weights", "perplexity", "KL, mean", "KL, 99th percentile", "same top-1"]
    assert 0 < float(table["KL, mean"][0]) < float(table["KL, 99th percentile"][0])
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_evaluated_and_can_be_again(run_jaxis, text, tmp_path):
    made = run_jaxis("quantize", EMBEDDED_MODEL, tmp_path / "q", "--quantization", "int4", "--evaluate", text)
    again = run_jaxis("quantize", EMBEDDED_MODEL, tmp_path / "q", "--evaluate", text)
    assert made.returncode == again.returncode == 0, made.stderr + again.stderr
    assert made.stdout == again.stdout
    assert float(table_of(made.stdout)["KL, mean"][0]) > 0
    assert again.stderr == ""


def test_widths_are_chosen_for_a_number_of_bits(run_jaxis, text, tmp_path):
    result = run_jaxis("quantize", EMBEDDED_MODEL, tmp_path / "q", "--target-bits", "6", "--evaluate", text)
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert len({rule["weight_qtype"] for rule in config["jaxis_quantization"]["qwix"]["rules"]}) > 1
    assert float(table_of(result.stdout)["weights"][2]) < 0.75 * 3.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "DESTINATION"),
        (("q", "--target-bits", "5"), "needs text to measure on"),
        (("q", "--max-kl", "0"), "not positive"),
        (("q", "--max-kl", "1", "--target-bits", "5", "--evaluate", "t"), "both given"),
        (("q", "--target-bits", "5", "--quantization", "int8", "--evaluate", "t"), "leave out --quantization"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(invoke, arguments, message):
    result = invoke("quantize", "model", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_file_that_cannot_be_read_is_an_error_of_one_line(invoke, tmp_path):
    result = invoke("quantize", EMBEDDED_MODEL, "--evaluate", tmp_path / "none.txt")
    assert result.exit_code == 3
    assert result.stderr == f"jaxis: error: {tmp_path / 'none.txt'} cannot be read: No such file or directory\n"


def test_calibrating_needs_a_destination(invoke):
    result = invoke("quantize", "model", "--calibrate", "t.txt", "--evaluate", "t.txt")
    assert result.exit_code == 2
    assert "give DESTINATION" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "cannot be read"),
        ("bad.jsonl", "nonsense\n", "line 1 is not JSON"),
        ("other.jsonl", '{"prompt": "x"}\n', "line 1 needs exactly one of 'text' and 'messages'"),
        ("short.txt", "x" * 100, "has 100 tokens; it needs 2048 or more"),
        ("empty.txt", "", "has 0 tokens; it needs 2048 or more"),
    ],
)
def test_a_file_unfit_for_calibration_is_an_error_of_one_line(invoke, checkpoint, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    result = invoke("quantize", checkpoint(), tmp_path / "q", "--calibrate", tmp_path / name)
    assert result.exit_code == 3
    assert result.stderr.startswith("jaxis: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "q").exists()
