"""`jaxis serve` with several models: what the file says is checked at the start, in one line that says where."""

import math

import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.server.several import pool as pools

MODELS = """
defaults: {max_model_len: 4096, idle_timeout: 10m}
models:
  - model: org/chat
    quantization: int8
    pinned: true
    prefix-caching: false
    max_queued: 3
    hf_overrides: {rope_theta: 1.5}
    seed: 7
  - {name: small, model_alias: ["gpt-*", o], idle_timeout: 30, max_num_seqs: 2, served_model_name: null}
"""


@pytest.fixture
def read(monkeypatch):
    """The models of a command line, in place of serving them."""
    made = []

    class Stop(Exception):
        pass

    def stop(models, limits, _start_engine):
        made.append((models, limits))
        raise Stop

    monkeypatch.setattr(pools, "ModelPool", stop)

    def run(*arguments):
        result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
        assert isinstance(result.exception, Stop), result.output
        return made.pop()

    return run


def test_each_model_has_its_own_options_over_the_defaults_over_the_command_lines(tmp_path, read):
    (tmp_path / "models.yaml").write_text(MODELS)
    options = ("--max-num-seqs", "5", "--no-prefix-caching", "--models-max", "2", "--api-key", "k")
    [chat, small], limits = read("--models", str(tmp_path / "models.yaml"), *options)
    assert (chat.name, small.name, small.names.aliases) == ("org/chat", "small", ("gpt-*", "o"))
    assert (chat.pinned, small.pinned, chat.idle_seconds, small.idle_seconds) == (True, False, 600.0, 30.0)
    of_chat, of_small = chat.engine_arguments, small.engine_arguments
    assert (of_chat["model"], of_small["model"]) == ("org/chat", None)
    assert (of_chat["max_model_len"], of_small["max_model_len"]) == (4096, 4096)
    assert (of_chat["max_num_seqs"], of_small["max_num_seqs"]) == (5, 2)
    assert (of_chat["quantization"], of_small.get("quantization")) == ("int8", None)
    assert (of_chat["enable_prefix_caching"], of_small["enable_prefix_caching"]) == (False, False)
    assert (of_chat["hf_overrides"], of_chat["seed"]) == ({"rope_theta": 1.5}, 7)
    assert (chat.config.max_queued, chat.config.api_keys, limits.most_loaded) == (3, ("k",), 2)


def test_several_models_of_the_command_line_are_called_as_one_is(tmp_path, read):
    (tmp_path / "folder").mkdir()
    models, limits = read("org/one", str(tmp_path / "folder"), "--idle-timeout", "1m", "--quantization", "int8")
    assert [model.name for model in models] == ["org/one", "folder"]
    assert {model.idle_seconds for model in models} == {60.0}
    assert {model.engine_arguments["quantization"] for model in models} == {"int8"}
    assert limits.most_loaded is None
    assert read("a", "b")[0][0].idle_seconds == math.inf


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models: [{model: x, max_modle_len: 3}]",
            "model 1 (x): the key 'max_modle_len' is unknown: did you mean max_m",
        ),
        ("models: [{model: a}, {model: x, max_model_len: many}]", "model 2 (x): Invalid value for '--max-model-len'"),
        ("models: [{model: x, port: 3}]", "model 1 (x): port is for all models: give --port to jaxis serve"),
        ("models: [{model: x, max_num_seqs: 0}]", "model 1 (x): max_num_seqs=0 must be an integer of at least 1"),
        ("models: [{model: x, enable_expert_parallel: 3}]", "enable_expert_parallel: 3 is not true or false"),
        ("models: [{model: x, pinned: 1}]", "model 1 (x): pinned: 1 is not true or false"),
        ("models: [{model: x, idle_timeout: soon}]", "model 1 (x): idle_timeout: 'soon' is no time"),
        ("models: [{model: x, tool_call_parser: nope}]", "model 1 (x): tool_call_parser='nope' is unknown"),
        ("models: [{model: x, name: y, served_model_name: z}]", "name and served_model_name say the same"),
        ("models: [{model: x}, {name: x}]", "models 1 and 2 are both called 'x'"),
        ("models: [x]", "model 1 is not an object of options"),
        ("models: {a: b}", "has no list of models"),
        ("models: []", "has no list of models"),
        ("models: [{model: x}]\nother: 1", "the key 'other' is unknown"),
        ("defaults: {name: y}\nmodels: [{model: x}]", "defaults: name is for one model"),
        ("defaults: {max_modle_len: 3}\nmodels: [{model: x}]", "the key 'max_modle_len' is unknown"),
        ("models: [", "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_file_and_key(tmp_path, text, message):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    line = _error("--models", str(path))
    assert line.startswith(f"jaxis: error: {path}")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["a", "--models", "nowhere.yaml"], "not both"),
        (["a", "a"], "both called 'a'"),
        (["a", "b", "--served-model-name", "c"], "--served-model-name is for one model"),
        (["a", "b", "--model-alias", "*"], "--model-alias is for one model"),
        (["a", "b", "--nnodes", "2"], "--nnodes is for one model"),
        (["a", "b", "--idle-timeout", "soon"], "idle_timeout"),
        (["a", "b", "--ssl-certfile", "c.pem"], "--ssl-keyfile"),
    ],
)
def test_mistakes_of_the_command_line_are_one_line(arguments, message):
    assert message in _error(*arguments)


def _error(*arguments):
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    return line
