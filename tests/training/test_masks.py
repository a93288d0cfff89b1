"""Learned parts of conversations, for every chat template that the tests have, against transformers' own masks."""

import json
import re

import numpy as np
import pytest
import transformers

from jaxis.errors import ConfigError
from jaxis.tokenizer.chat_messages import messages_for_template
from jaxis.tokenizer.template_choice import chat_template_source, read_tokenizer, template_names
from jaxis.training.examples import ExampleEncoder, shown
from jaxis.training.rows import DataRow, Dialogue
from tests.support.agent_templates import AGENT_TEMPLATES
from tests.tokenizer.test_chat_template import LLAMA31_LIKE, MISTRAL_LIKE, QWEN3_LIKE

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHANNEL = re.compile(r"<\|(?:open|close)\|>\w+<\|sep\|>")
SPECIAL = re.compile(r"<\|\w+\|>|<\uff5c[^\uff5c]+\uff5c>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|\[TOOL_CALLS\]")


def user(text):
    return {"role": "user", "content": text}


def answer(text, thought=None, call=None):
    message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if call is not None:
        arguments = json.dumps({"at": call})
        message["tool_calls"] = [
            {"id": "abcde1234", "type": "function", "function": {"name": "look", "arguments": arguments}}
        ]
    return message


RESULT = {"role": "tool", "name": "look", "tool_call_id": "abcde1234", "content": "seen"}
CHATS = {
    "turns": ([user("one"), answer("two"), user("three"), answer("four")], None),
    "thinking": ([user("one"), answer("two", "hm"), user("three"), answer("four", "well")], None),
    "calls": (
        [user("one"), answer("", "hm", "it"), RESULT, answer("two", "ah"), user("three"), answer("four")],
        [TOOL],
    ),
}


def with_blocks(template):
    """The template with a generation block around what it writes of an answer, its end-of-turn token included."""

    def marked(match):
        body = match[2]
        block = "{% generation %}" + body + "{% endgeneration %}"
        return match[1] + "{% if m.role == 'assistant' %}" + block + "{% else %}" + body + "{% endif %}"

    if "[INST]" in template:  # Mistral's: answers have a branch of their own
        return template.replace("{% else %}{{ m.content }}", "{% else %}{% generation %}{{ m.content }}").replace(
            "{{ eos_token }}{% endif %}{% endfor %}", "{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
        )
    return re.sub(
        r"(<(?:\|im_start\||start_of_turn)>{{ m\.role }}\n)(.*?<(?:\|im_end\||end_of_turn)>)",
        marked,
        template,
        flags=re.DOTALL,
    )


@pytest.fixture(scope="module")
def tokenizers(checkpoint, tmp_path_factory):
    """Ours and transformers', for any template: its special tokens are theirs."""
    source, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("tokenizers")

    def load(template):
        path = folder / str(len(list(folder.iterdir())))
        theirs = transformers.AutoTokenizer.from_pretrained(source)
        theirs.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)) | {"</s>"})})
        theirs.bos_token, theirs.eos_token = "<|endoftext|>", "</s>" if "eos_token" in template else "<|im_end|>"
        theirs.save_pretrained(path)
        (path / "config.json").write_bytes((source / "config.json").read_bytes())
        (path / "template.jinja").write_text(template)
        return read_tokenizer(path, path / "template.jinja"), theirs

    return load


def examples_of(tokenizer, messages, tools):
    return ExampleEncoder(tokenizer, {}, "all_assistant_turns", 4096).encode(
        [DataRow(Dialogue(messages, tools), "row")]
    )


def learned_runs(ids, mask):
    """The token ids of each stretch that is learned."""
    changes = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, int), [0]])))
    return [list(ids[a:b]) for a, b in changes.reshape(-1, 2)]


def expected_runs(theirs, messages, tools, template):
    """The last stretch of transformers' mask of the conversation up to each answer."""
    found = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            output = theirs.apply_chat_template(
                messages[: turn + 1],
                tools=tools,
                chat_template=template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            found.append(learned_runs(output["input_ids"], output["assistant_masks"])[-1])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", AGENT_TEMPLATES)
def test_masks_of_blocks_and_of_rendered_prompts_are_those_of_transformers(tokenizers, name, chat):
    # One opens answers by another name than it writes, which is none of what is tested here.
    plain, (messages, tools) = (
        AGENT_TEMPLATES[name].replace("<start_of_turn>model", "<start_of_turn>assistant"),
        CHATS[chat],
    )
    tagged = with_blocks(plain)
    assert "endgeneration" in tagged
    ours, theirs = tokenizers(tagged)
    expected = expected_runs(theirs, messages_for_template(messages, ours, tools=tools), tools, tagged)
    for template in (tagged, plain):
        ours, _ = tokenizers(template)
        encoded = examples_of(ours, messages, tools)
        runs = [run for each in encoded.examples for run in learned_runs(each.ids.tolist(), each.learned)]
        assert runs == expected, [shown(each, ours) for each in encoded.examples]
        assert (encoded.counts["unlike"], encoded.counts["endless"]) == (0, 0)
        assert len(encoded.examples) == (2 if name == "drops_reasoning" and chat != "turns" else 1)


@pytest.mark.parametrize("name", template_names())
def test_templates_that_jaxis_brings_end_what_is_learned_with_the_turn(tokenizers, name):
    ours, _ = tokenizers(chat_template_source(name))
    messages, _ = CHATS["turns"]
    encoded = examples_of(ours, messages, None)
    text = "".join(shown(each, ours) for each in encoded.examples)
    learned = [part.partition("»")[0].replace(" ", "").strip() for part in text.split("«")[1:]]
    learned = [re.sub(CHANNEL, "", each.removeprefix("</think>")) for each in learned]
    assert [re.sub(SPECIAL, "|", each) for each in learned] == ["two|", "four|"]
    # DeepSeek's leave out what was thought before a later question.
    assert (len(encoded.examples), len(encoded.notes(4096))) == ((2, 1) if "deepseek" in name else (1, 0))


def test_a_block_that_changes_its_text_is_refused(tokenizers):
    trimmed = "{% for m in messages %}{% set x %}{% generation %}  {{ m.content }} {% endgeneration %}{% endset %}"
    ours, _ = tokenizers(trimmed + "{{ x | trim }}<|im_end|>{% endfor %}")
    with pytest.raises(ConfigError, match=r"row: the chat template changes what its generation blocks hold"):
        examples_of(ours, *CHATS["turns"])


@pytest.mark.parametrize(
    ("template", "messages", "tools", "named"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
            [answer("hello"), user("one"), answer("two")],
            None,
            "begins with an answer",
        ),
        # What it writes of tools comes after all messages.
        (LLAMA31_LIKE, [user("one"), answer("two")], [TOOL], r"what is learned of messages\[1\] is undefined"),
        (
            with_blocks(AGENT_TEMPLATES["chatml"]).replace("m.role == 'assistant'", "m.role == 'nobody'"),
            [user("one"), answer("two")],
            None,
            r"generation blocks hold nothing of messages\[1\]",
        ),
    ],
)
def test_a_mask_that_is_undefined_is_an_error_with_a_name(tokenizers, template, messages, tools, named):
    ours, _ = tokenizers(template)
    with pytest.raises(ConfigError, match=named) as caught:
        examples_of(ours, messages, tools)
    assert str(caught.value).startswith("row: ")


def test_templates_like_published_ones_learn_what_their_prompts_leave_to_the_model(tokenizers):
    thinking, _ = CHATS["thinking"]
    ours, _ = tokenizers(QWEN3_LIKE)
    texts = [shown(each, ours) for each in examples_of(ours, thinking, None).examples]
    assert [re.findall("«(.*?)»", each, re.DOTALL) for each in texts] == [
        ["<think>hm</think>two<|im_end|>"],
        ["<think>well</think>four<|im_end|>"],
    ]
    ours, theirs = tokenizers(MISTRAL_LIKE)
    turns, _ = CHATS["turns"]
    encoded = examples_of(ours, turns, None)
    runs = [run for each in encoded.examples for run in learned_runs(each.ids.tolist(), each.learned)]
    assert runs == expected_runs(theirs, turns, None, MISTRAL_LIKE)
