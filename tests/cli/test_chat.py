"""`jaxis chat` where stdin is a pipe, and the session behind it."""

import json
import re

import pytest
from typer.testing import CliRunner

from jaxis import LLM, SamplingParams
from jaxis.cli.chat_session import ChatSession
from jaxis.cli.main import app
from jaxis.errors import ConfigError
from tests.support.cli_model import write_checkpoint

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--repetition-penalty", "1.5")


def answers_of(llm, questions, system=None):
    """The conversation as the Python API has it."""
    params = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.5, top_k=7)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, params, progress=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return messages


def chat_and_save(invoke, tmp_path, lines, *options):
    """Runs a chat that saves itself at the end; returns its result and the messages saved."""
    path = tmp_path / "conversation.json"
    result = invoke("chat", *options, *GREEDY, stdin="\n".join([*lines, f"/save {path}"]))
    return result, json.loads(path.read_text())["messages"]


def test_each_line_is_a_turn_that_sees_those_before(invoke, tmp_path, chat_llm):
    expected = answers_of(chat_llm, ["one", "two"], "brief")
    result, messages = chat_and_save(invoke, tmp_path, ["one", "", "two"], "--system", "brief")
    assert result.exit_code == 0, result.stderr
    assert messages == expected
    assert result.stdout == "".join(m["content"] + "\n" for m in expected if m["role"] == "assistant")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("lines", "questions", "system"),
    [
        (["one", "/clear", "two"], ["two"], None),
        (["one", "two", "/undo", "three"], ["one", "three"], None),
        (["one", "/retry", "two"], ["one", "two"], None),
        (["/system brief", "one"], ["one"], "brief"),
        (["/system brief", "/system", "one"], ["one"], None),
        (["/system brief", "one", "/clear", "two"], ["two"], "brief"),
        (["one", "/quit", "two"], None, None),
    ],
)
def test_commands_change_the_conversation(invoke, tmp_path, chat_llm, lines, questions, system):
    if questions is None:
        result = invoke("chat", *GREEDY, stdin="\n".join(lines))
        assert result.exit_code == 0
        assert result.stdout == answers_of(chat_llm, ["one"])[-1]["content"] + "\n"
        return
    result, messages = chat_and_save(invoke, tmp_path, lines)
    assert result.exit_code == 0, result.stderr
    assert messages == answers_of(chat_llm, questions, system)


def test_load_goes_on_with_what_save_wrote(invoke, tmp_path, chat_llm):
    first = tmp_path / "first.json"
    invoke("chat", *GREEDY, "--system", "brief", stdin=f"one\n/save {first}\n")
    result, messages = chat_and_save(invoke, tmp_path, [f"/load {first}", "two"])
    assert messages == answers_of(chat_llm, ["one", "two"], "brief")
    assert f"(loaded 3 messages from {first})" in result.stderr


def test_save_replaces_a_conversation_and_nothing_else(invoke, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    result = invoke("chat", *GREEDY, stdin=f"/save {precious}\n")
    assert (result.exit_code, precious.read_text()) == (1, "precious")
    assert "holds no conversation" in result.stderr
    path = tmp_path / "conversation.json"
    result = invoke("chat", *GREEDY, stdin=f"/save {path}\none\n/save {path}\n")
    assert result.exit_code == 0
    assert len(json.loads(path.read_text())["messages"]) == 2


def test_set_changes_the_sampling_of_later_answers(invoke):
    lines = "/set max_tokens 3\n/stats on\none\n/set max_tokens none\n/set temperature 0.5\n/set stop é\n/set\n"
    result = invoke("chat", *GREEDY, stdin=lines)
    assert result.exit_code == 0, result.stderr
    assert " 3 generated" in result.stderr
    assert "(cut off: max_tokens=3 reached, /set max_tokens changes it)" in result.stderr
    assert "temperature=0.5  top_k=7" in result.stderr
    assert "max_tokens=None  min_tokens=0  stop=['é']" in result.stderr


def test_help_lists_every_command_and_key(invoke):
    result = invoke("chat", stdin="/help\n")
    for expected in ("/system", "/set", "/stats", "/undo", "/retry", "/save", "/load", "/quit", "Alt-Enter", "Ctrl-C"):
        assert expected in result.stderr
    assert result.stdout == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/frobnicate", "there is no command /frobnicate: /help lists them"),
        ("/set temperature -1", "temperature=-1 must be at least 0"),
        ("/set temperature warm", "temperature='warm' must be a finite number"),
        ("/set beams 4", "/set has no field 'beams'"),
        ("/set seed", "needs a value"),
        ("/stats", "/stats needs on or off"),
        ("/save", "/save needs a file name"),
        ("/load /nonexistent.json", "/nonexistent.json cannot be read: No such file or directory"),
        ("/load /dev/null", "is not JSON"),
        ("/undo", "there is nothing to undo"),
        ("/retry", "there is no question to ask again"),
        ("é" * 200, "does not fit the context of 256: /undo takes back the last turn, /clear starts over"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(invoke, tmp_path, chat_llm, line, message):
    result, messages = chat_and_save(invoke, tmp_path, [line, "one"])
    assert result.exit_code == 1
    [error] = [text for text in result.stderr.splitlines() if text.startswith("jaxis: error: ")]
    assert message in error
    assert messages == answers_of(chat_llm, ["one"])


def test_answers_have_seeds_of_their_own_that_the_stats_name(invoke, tmp_path):
    path = tmp_path / "conversation.json"
    lines = ["/set min_tokens 12", "one", "/retry", f"/save {path}"]
    # No answer ends by itself: 12 tokens of two seeds are the same once in 10^28 times.
    unfiltered = ("--temperature", "1", "--top-p", "1", "--top-k", "0")
    result = invoke("chat", "--stats", "--max-tokens", "12", *unfiltered, stdin="\n".join(lines))
    first, second = re.findall(r"seed (\d+)\)", result.stderr)
    assert first != second
    again = invoke("chat", "--max-tokens", "12", *unfiltered, "--seed", second, stdin="/set min_tokens 12\none\n")
    assert json.loads(path.read_text())["messages"][1]["content"] + "\n" == again.stdout


def test_an_answer_that_fills_the_context_says_so(invoke, chat_llm):
    result = invoke("chat", "--temperature", "0", "--repetition-penalty", "1.5", stdin="one\n")
    assert "(cut off: the context of 256 tokens is full, /clear starts over)" in result.stderr


def test_a_model_without_chat_template_is_refused_before_its_weights_are_read(tmp_path):
    folder = write_checkpoint(tmp_path / "base-model", chat_template=False)
    (folder / "model.safetensors").write_text("not weights")
    result = CliRunner().invoke(app, ["chat", str(folder)], input="hello\n")
    assert result.exit_code == 1
    assert result.stderr == (
        f"jaxis: error: {folder} has no chat template, so it cannot chat: give one with --chat-template FILE or NAME "
        "(chatml, deepseek-v4, deepseek-v4.1, gemma, kimi-k3, llama2, llama3, mistral, mistral-v7, phi3, zephyr), or "
        "use `jaxis generate`\n"
    )


def test_a_base_model_chats_with_a_named_template(tmp_path):
    folder = write_checkpoint(tmp_path / "base-model", chat_template=False)
    options = ("--chat-template", "chatml", "--load-format", "dummy", "--kv-cache-memory", "8MiB", *GREEDY)
    result = CliRunner().invoke(app, ["chat", str(folder), *options], input="one\n")
    assert result.exit_code == 0, result.stderr
    with LLM(folder, load_format="dummy", kv_cache_memory="8MiB", chat_template="chatml", show_progress=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.5, top_k=7)
        [output] = llm.chat([{"role": "user", "content": "one"}], params, progress=False)
        assert output.prompt == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
        assert result.stdout == output.outputs[0].text + "\n"
        assert llm.engine.eos_token_ids == {llm.tokenizer.token_to_id("<|im_end|>")}
        with pytest.raises(ConfigError, match="neither a file nor a template's name"):
            llm.chat([{"role": "user", "content": "one"}], params, chat_template="no-such")


class InterruptedStream:
    """An LLM whose Ctrl-C comes after so many deltas of the real one's stream."""

    def __init__(self, llm, after):
        self.llm, self.after, self.closed = llm, after, False
        self.tokenizer, self.max_model_len, self.images = llm.tokenizer, llm.max_model_len, llm.images

    def stream(self, prompt, params):
        try:
            for i, delta in enumerate(self.llm.stream(prompt, params)):
                if i == self.after:
                    raise KeyboardInterrupt
                yield delta
        finally:
            self.closed = True


@pytest.mark.parametrize(("after", "num_kept"), [(0, 0), (4, 2)])
def test_an_interrupted_answer_is_kept_as_far_as_it_came(chat_llm, capsys, after, num_kept):
    llm = InterruptedStream(chat_llm, after)
    session = ChatSession(llm, SamplingParams(temperature=0.0, max_tokens=50, repetition_penalty=1.5))
    with pytest.raises(KeyboardInterrupt):
        session.ask("hello")
    assert llm.closed
    assert len(session.conversation.turns) == num_kept
    if num_kept:
        assert session.conversation.turns[1]["content"] == capsys.readouterr().out.removesuffix("\n")
