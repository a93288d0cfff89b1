"""Chat templates that the user chooses: the ones that jaxis brings, against the formats' documentation, and files."""

import json
import os

import pytest
import transformers

from jaxis.errors import ConfigError
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.template_choice import (
    MAX_TEMPLATE_BYTES,
    chat_template_source,
    read_tokenizer,
    template_names,
    turn_end_token_id,
)
from tests.support.cli_model import write_checkpoint

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
# Written by hand from each format's documentation.
DOCUMENTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "Hello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]",
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST] Hello</s>[INST] Bye [/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello</s>[INST]Bye[/INST]",
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n"
        "<|assistant|>\n"
    ),
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nBye</s>\n<|assistant|>\n"
    ),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_named_template_writes_the_documented_format(name):
    assert render_chat_template(chat_template_source(name), CHAT, **ENDS) == DOCUMENTED[name]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_earlier_turn_stays_as_it_was(name):
    source = chat_template_source(name)
    asked = render_chat_template(source, CHAT[:2], **ENDS)
    assert render_chat_template(source, CHAT, **ENDS).startswith(asked)
    answered = render_chat_template(source, CHAT[:3], add_generation_prompt=False, **ENDS)
    assert DOCUMENTED[name].startswith(answered)


def test_all_templates_that_are_there_are_tested():
    of_programs = "deepseek-v4", "deepseek-v4.1", "kimi-k3"  # which test_deepseek_templates.py and another file test
    assert template_names() == sorted([*DOCUMENTED, *of_programs])


def test_a_template_is_a_file_a_name_or_source(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}é", encoding="utf-8")
    assert chat_template_source(path) == chat_template_source(str(path)) == "{{ messages[0].content }}é"
    assert chat_template_source("{{ 1 }}") == "{{ 1 }}"
    assert chat_template_source("rag", {"rag": "{{ 2 }}"}) == "{{ 2 }}"


def test_what_is_no_template_is_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"a" * (MAX_TEMPLATE_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe{{")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "broken").write_text("{% for m in messages %}")
    for asked, reason in (
        ("no-such", "neither a file nor a template's name: choose from chatml, "),
        (tmp_path / "pipe", "neither a file nor"),
        (tmp_path, "neither a file nor"),
        (tmp_path / "large", "more than 1 MiB"),
        (tmp_path / "binary", "is not UTF-8"),
        (tmp_path / "empty", "is empty"),
        (tmp_path / "broken", "syntax error in line 1"),
    ):
        with pytest.raises(ConfigError, match=reason) as raised:
            chat_template_source(asked)
        assert "\n" not in str(raised.value)


def test_a_template_that_refuses_some_conversations_is_taken():
    source = "{{ raise_exception('system message needed') }}"
    assert chat_template_source(source) == source


def test_the_end_of_a_turn_is_the_special_token_after_an_answer(tmp_path):
    folder = write_checkpoint(tmp_path / "base", chat_template=False)
    for name, end in (("chatml", "<|im_end|>"), ("gemma", None)):
        tokenizer = read_tokenizer(folder, name)
        assert turn_end_token_id(tokenizer) == (None if end is None else tokenizer.token_to_id(end))
    assert not read_tokenizer(folder).has_chat_template


def test_a_template_without_a_tokenizer_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "tokens", tokenizer=False)
    assert read_tokenizer(folder) is None
    with pytest.raises(ConfigError, match="tokens has no tokenizer"):
        read_tokenizer(folder, "chatml")


def test_a_template_of_processors_comes_between_the_other_files(tmp_path):
    tmp_path = tmp_path / "model"
    write_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": "tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_tokenizer(tmp_path).default_chat_template == "tokenizer"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    of_reference, _ = transformers.ProcessorMixin.get_processor_dict(tmp_path)
    assert read_tokenizer(tmp_path).default_chat_template == of_reference["chat_template"] == "processor"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_tokenizer(tmp_path).default_chat_template == "jinja"
