"""`jaxis infer` and `jaxis run-batch`: where configuration, input and output come from, and how they end."""

import json

import pytest
import typer
from typer.testing import CliRunner

from jaxis.cli.command import apply_overrides
from jaxis.cli.main import app

ROW = {"conversation_id": "a", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
SMALL = ("--model.model_kwargs.kv_cache_memory=8MiB", "--model.model_kwargs.max_num_seqs", "2")


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def test_options_override_fields_of_the_file():
    values = {"generation": {"temperature": 0.5, "seed": 1}, "model": None}
    words = ["--generation.temperature", "1e-1", "--model.model_kwargs.quantization=int8", "--output-path", "o"]
    apply_overrides(values, [*words, "--generation.presence_penalty", "-1"])
    assert values == {
        "generation": {"temperature": 0.1, "seed": 1, "presence_penalty": -1},
        "model": {"model_kwargs": {"quantization": "int8"}},
        "output_path": "o",
    }


@pytest.mark.parametrize("words", [["word"], ["--generation.seed"], ["--engine.x", "1"], ["--"]])
def test_options_that_are_no_fields_are_wrong_usage(words):
    with pytest.raises(typer.BadParameter):
        apply_overrides({"engine": "JAX"}, words)


def test_file_to_file_and_stdin_to_stdout_answer_alike(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\nbroken\n")
    config = tmp_path / "config.yaml"
    config.write_text(f"input_path: {tmp_path}/in.jsonl\noutput_path: {tmp_path}/out.jsonl\nengine: JAX\n")
    result = invoke("infer", "-c", config, "--generation.max_new_tokens", "16", *SMALL)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert result.stderr.endswith("1 of 2 rows answered, 1 failed\n")
    answered = (tmp_path / "out.jsonl").read_text()
    assert "Paris" in json.loads(answered.splitlines()[0])["messages"][-1]["content"]

    piped = invoke("infer", "--generation.max_new_tokens", "16", *SMALL, stdin=(tmp_path / "in.jsonl").read_text())
    assert piped.stdout == answered


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "twice.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    for arguments, named in (
        (("-c", tmp_path / "none.yaml"), "cannot be read"),
        (("--generation.temprature", "1"), "generation.temprature"),
        (("--input_path", tmp_path / "none.jsonl"), "cannot be read"),
        (("--input_path", tmp_path / "twice.jsonl"), "lines 1 and 2 have the same conversation_id 'a'"),
        (("--model.adapter_trainable", "true"), "model.adapter_trainable"),
    ):
        result = invoke("infer", *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("jaxis: error: ")
        assert result.stderr.count("\n") == 1
        assert named in result.stderr


def test_interactive_takes_the_parameters_of_the_configuration(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("generation:\n  max_new_tokens: 3\n")
    result = invoke("infer", "-c", config, "-i", *SMALL, stdin="What is the capital of France?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The capital of")
    assert "max_tokens=3 reached" in result.stderr


def test_run_batch_answers_a_file(tmp_path):
    lines = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {"model": "gpt", "messages": ROW["messages"]}},
        {"custom_id": "b", "url": "/v1/chat/completions", "body": {"model": "other", "messages": ROW["messages"]}},
    ]
    path, output, progress = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "progress.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = invoke(
        *("run-batch", "-i", path, "-o", output, "--served-model-name", "gpt", "--progress-file", progress),
        *("--kv-cache-memory", "8MiB", "--max-num-seqs", "2"),
    )
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, output.read_text().splitlines())
    assert "Paris" in first["response"]["body"]["choices"][0]["message"]["content"]
    assert (second["custom_id"], second["response"]["status_code"]) == ("b", 400)
    assert json.loads(progress.read_text())["failed"] == 1
