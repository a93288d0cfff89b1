"""`jaxis generate`: which prompt reaches the model, what is printed where, and how it ends."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jaxis import LLM, SamplingParams
from jaxis.cli.main import app
from tests.support.cli_model import JAXIS

GREEDY = ("--temperature", "0", "--max-tokens", "12")
LONG = ("--load-format", "dummy", "--hf-overrides", '{"max_position_embeddings": 16384}', "--max-tokens", "16000")


def greedy(max_tokens=12, **more):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def test_prints_the_answer_to_the_prompt_as_a_user_message(invoke, chat_llm):
    [expected] = chat_llm.chat([{"role": "user", "content": "hello"}], greedy(), progress=False)
    result = invoke("generate", "folder", "hello", *GREEDY)
    assert result.exit_code == 0, result.output
    assert result.stdout.removesuffix("\n") == expected.outputs[0].text.removesuffix("\n")
    assert result.stderr == ""


def test_raw_continues_the_text(invoke, chat_llm):
    [expected] = chat_llm.generate("hello", greedy(), progress=False)
    result = invoke("generate", "folder", "hello", "--raw", "--json", *GREEDY)
    completion = json.loads(result.stdout)
    assert completion["token_ids"] == expected.outputs[0].token_ids
    assert completion["num_prompt_tokens"] == len("hello")


def test_system_message_and_template_variables_reach_the_template(invoke, chat_llm):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    num_prompt_tokens = len(chat_llm.tokenizer.encode_chat(messages)) + len("HEY")
    arguments = ("--system", "be brief", "--chat-template-kwargs", '{"shout": 1}', "--json")
    result = invoke("generate", "folder", "hello", *arguments, *GREEDY)
    assert json.loads(result.stdout)["num_prompt_tokens"] == num_prompt_tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "stdin", "model", "prompt"),
    [
        (["What is it?"], "", None, "What is it?"),
        (["12/4="], "", None, "12/4="),
        (["org/name", "text"], "", "org/name", "text"),
        (["org/name", "-"], "from stdin\n", "org/name", "from stdin"),
        (["org/name"], "from stdin\r\n", "org/name", "from stdin"),
        (["./folder"], "two\nlines\n", "./folder", "two\nlines"),
        (["-"], "from stdin", None, "from stdin"),
        ([], "from stdin\n\n", None, "from stdin\n"),
    ],
)
def test_which_word_is_the_model_and_which_the_prompt(invoke, words, stdin, model, prompt):
    result = invoke("generate", *words, "--raw", "--json", *GREEDY, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert invoke.opened[0][0] == model
    assert json.loads(result.stdout)["num_prompt_tokens"] == len(prompt.encode())


def test_a_lone_checkpoint_folder_names_the_model(invoke, chat_model, monkeypatch):
    monkeypatch.chdir(chat_model.parent)
    invoke("generate", chat_model.name, "--raw", *GREEDY, stdin="x")
    assert invoke.opened[0][0] == chat_model.name


def test_options_become_engine_arguments(invoke):
    options = ("--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "2", "--kv-cache-memory", "1GiB")
    more = (
        "--kv-cache-dtype",
        "int8",
        "--no-prefix-caching",
        "--hf-overrides",
        '{"a": 1}',
        "--revision",
        "v1",
        "--load-format",
        "dummy",
    )
    invoke("generate", "x", *options, *more, *GREEDY)
    assert invoke.opened[0][1] == {
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "kv_cache_memory": "1GiB",
        "kv_cache_dtype": "int8",
        "enable_prefix_caching": False,
        "enable_return_routed_experts": False,
        "hf_overrides": {"a": 1},
        "revision": "v1",
        "load_format": "dummy",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "decode_context_parallel_size": 1,
        "kv_offloading_backend": "native",
        "kv_offloading_disk_size": "32GiB",
        "chat_template": None,
        "logprobs_mode": "raw_logprobs",
        "merge": False,
        "pack_cache": False,
        "pack_cache_size": "50GiB",
    }


def test_every_engine_argument_is_one_of_the_llm():
    import inspect

    from jaxis.cli.options import EngineOptions

    assert set(EngineOptions().llm_arguments()) <= set(inspect.signature(LLM).parameters)


def test_options_override_the_checkpoints_sampling_defaults(invoke, chat_llm, monkeypatch):
    seen = []
    stream = chat_llm.stream
    monkeypatch.setattr(
        chat_llm, "stream", lambda prompt, params, **more: seen.append(params) or stream(prompt, params, **more)
    )
    invoke("generate", "x", "--top-p", "0.5", "--seed", "3", "--stop", "a", "--stop", "b", "--max-tokens", "4")
    [params] = seen
    assert (params.temperature, params.top_k) == (0.9, 7)  # generation_config.json's
    assert (params.top_p, params.seed, params.stop, params.max_tokens) == (0.5, 3, ["a", "b"], 4)


def test_json_holds_one_object_a_completion_with_logprobs(invoke, chat_llm):
    result = invoke(
        "generate", "hello", "--raw", "--json", "--logprobs", "2", "--temperature", "0", "--max-tokens", "3"
    )
    [expected] = chat_llm.generate("hello", greedy(3, logprobs=2), progress=False)
    completion = json.loads(result.stdout)
    assert completion["finish_reason"] == "length"
    assert completion["text"] == expected.outputs[0].text
    best = [position[0] for position in completion["logprobs"]]
    assert [entry["token_id"] for entry in best] == expected.outputs[0].token_ids
    for entry, position in zip(best, expected.outputs[0].logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(position[entry["token_id"]].logprob)


def test_several_completions(invoke):
    result = invoke("generate", "hello", "--n", "3", "--seed", "1", "--json", "--max-tokens", "8")
    completions = [json.loads(line) for line in result.stdout.splitlines()]
    assert [completion["index"] for completion in completions] == [0, 1, 2]
    assert len({tuple(completion["token_ids"]) for completion in completions}) == 3


def test_stats_are_on_stderr(invoke):
    result = invoke("generate", "hello", "--raw", "--stats", *GREEDY)
    assert "5 prompt tokens, 12 generated, " in result.stderr
    assert "generated" not in result.stdout


def test_a_sampled_answer_is_another_each_time_and_says_how_to_repeat_it(invoke):
    *others, second = (invoke("generate", "hello", "--max-tokens", "12") for _ in range(8))  # some end at once
    assert {other.stdout for other in others} != {second.stdout}
    note = re.fullmatch(r"\(seed (\d+): --seed \1 gives this answer again\)\n", second.stderr)
    assert note, second.stderr
    again = invoke("generate", "hello", "--max-tokens", "12", "--seed", note[1])
    assert (again.stdout, again.stderr) == (second.stdout, "")
    assert "seed" not in invoke("generate", "hello", *GREEDY).stderr


def test_token_ids_in_and_out(invoke, chat_llm):
    [expected] = chat_llm.generate([[1, 2, 3]], greedy(6), progress=False)
    result = invoke("generate", "folder", "1, 2 3", "--token-ids", "--temperature", "0", "--max-tokens", "6")
    assert result.stdout == " ".join(map(str, expected.outputs[0].token_ids)) + "\n"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["What", "is", "this?"], 2, "quotes"),
        (["x", "--temperature", "-1"], 2, "--temperature"),
        (["x", "--top-p", "2"], 2, "top_p"),
        (["x", "--hf-overrides", "[1]"], 2, "--hf-overrides"),
        (["x", "--logprobs", "1"], 2, "--json"),
        (["x", "--raw", "--system", "s"], 2, "--system"),
        (["x", "--token-ids", "--stop", "s"], 2, "stop_token_ids"),
        (["x", "--dtype", "float8"], 2, "--dtype"),
        (["m", "1 two", "--token-ids"], 1, "'two'"),
        (["m", ""], 1, "prompt is empty"),
        (["m", "é" * 200], 1, "256"),
        (["a prompt too long for a file name " * 20], 1, "256"),
        (["m", "1 99999", "--token-ids"], 1, "99999"),
    ],
)
def test_mistakes(invoke, arguments, exit_code, message):
    result = invoke("generate", *arguments)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert result.stdout == ""
    if exit_code == 1:
        assert result.stderr.startswith("jaxis: error: ")
        assert result.stderr.count("\n") == 1


def test_a_model_without_tokenizer_takes_token_ids_only(monkeypatch, tokens_model):
    with LLM(tokens_model, load_format="dummy", show_progress=False) as llm:
        monkeypatch.setattr("jaxis.cli.generate.open_llm", lambda *args, **options: contextlib.nullcontext(llm))
        refused = CliRunner().invoke(app, ["generate", "m", "hello"])
        answered = CliRunner().invoke(app, ["generate", "m", "1 2", "--token-ids", "--max-tokens", "3"])
    assert refused.exit_code == 1
    assert "--token-ids" in refused.stderr
    assert len(answered.stdout.split()) == 3


def test_stdin_that_is_not_utf8():
    result = CliRunner().invoke(app, ["generate", "-"], input=b"\xff\xfe")
    assert result.exit_code == 1
    assert result.stderr.startswith("jaxis: error: stdin is not UTF-8")


@pytest.mark.sampled
@pytest.mark.parametrize("words", [[], ["org/name"]])
def test_no_prompt_on_a_terminal_is_wrong_usage(cli_environment, words):
    parent, child = pty.openpty()
    command = [*JAXIS, "generate", *words]
    result = subprocess.run(command, stdin=child, capture_output=True, text=True, env=cli_environment, check=False)
    os.close(parent)
    os.close(child)
    assert result.returncode == 2
    assert "prompt is missing" in result.stderr


def test_piped_output_is_the_answer_and_nothing_else(run_jaxis, chat_model, chat_llm):
    [expected] = chat_llm.chat([{"role": "user", "content": "hello"}], greedy(), progress=False)
    result = run_jaxis("generate", chat_model, "hello", "--load-format", "dummy", *GREEDY)
    assert result.returncode == 0, result.stderr
    assert result.stdout.removesuffix("\n") == expected.outputs[0].text.removesuffix("\n")
    assert result.stderr == ""


@pytest.mark.sampled
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("seconds", [0.1, 0.7])  # while JAX is imported, while the engine is built
def test_ctrl_c_while_loading_exits_with_130(cli_environment, chat_model, seconds):
    program = f"""
import os, signal, sys, threading, time
from jaxis.cli.main import main

def interrupt():
    while "jax" not in sys.modules:  # whose import begins the work, however long the machine takes to get there
        time.sleep(0.01)
    time.sleep({seconds})
    os.kill(os.getpid(), signal.SIGINT)

assert "jax" not in sys.modules
threading.Thread(target=interrupt, daemon=True).start()
main()
"""
    command = [sys.executable, "-c", program, "generate", str(chat_model), "hello", *LONG]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=cli_environment, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "\n")


@pytest.fixture
def long_answer(cli_environment, chat_model, ctrl_c):
    """A process that has begun an answer of many seconds; its output cannot be all newlines."""
    command = [*JAXIS, "generate", str(chat_model), "hello", "--repetition-penalty", "1.3", *LONG]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cli_environment)
    assert process.stdout.read(1)
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_exits_with_130(long_answer):
    long_answer.send_signal(signal.SIGINT)
    _, stderr = long_answer.communicate(timeout=30)
    assert long_answer.returncode == 130
    assert stderr == b"\n"


def test_a_closed_pipe_ends_it_quietly(long_answer):
    long_answer.stdout.close()
    assert long_answer.wait(timeout=30) == 141
    assert long_answer.stderr.read() == b""
