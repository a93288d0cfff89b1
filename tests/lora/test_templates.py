"""Chat templates that adapters bring, and what ends answers in a folder's own template."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers

from jaxis import LLM, SamplingParams
from jaxis.bringup.convert.convert import convert_checkpoint
from jaxis.bringup.convert.merged import convert_merged, merged_beside
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.lora import LoRARequest
from jaxis.models.written_template import write_template
from jaxis.tokenizer.template_choice import answer_end_token_ids, chat_template_source, read_tokenizer, with_template
from tests.support.adapters import save_adapter

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
END, TEXT_END = 3067, 3065  # <|im_end|>, <|endoftext|>
CHATML = chat_template_source("chatml")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The embedded model as a base model is: without a template, and without the token that ends its turns."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(EMBEDDED_MODEL, folder)
    _edit(folder / "tokenizer_config.json", chat_template=None, eos_token="<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        _edit(folder / name, eos_token_id=TEXT_END)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """An adapter that changes nothing, with a template."""
    folder = save_adapter(base, tmp_path_factory.mktemp("adapters") / "a", scale=0.0)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def _edit(path, **values):
    kept = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))


def _reference(folder):
    """Answer of transformers' own `generate`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_written_model_ends_where_its_template_does(base, adapter, tmp_path):
    merged = tmp_path / "merged"
    convert_merged(base, adapter, merged)
    expected = _reference(merged)
    assert expected[-1] == END
    assert len(expected) < 24
    for name in ("config.json", "generation_config.json"):
        assert json.loads((merged / name).read_text())["eos_token_id"] == [TEXT_END, END]
    with merged_beside(base, adapter, tmp_path / "orbax") as folder:
        convert_checkpoint(folder, tmp_path / "orbax", "orbax")
    for model in (merged, tmp_path / "orbax"):
        with LLM(str(model), dtype="float32", show_progress=False) as llm:
            [answer] = llm.chat(CHAT, GREEDY)
        assert (answer.outputs[0].token_ids, answer.outputs[0].finish_reason) == (expected, "stop")


def test_a_folders_own_template_ends_answers(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    with LLM(str(folder), show_progress=False) as llm:
        [answer] = llm.chat(CHAT, GREEDY)
    assert (answer.outputs[0].token_ids[-1], answer.outputs[0].finish_reason) == (END, "stop")
    write_template(folder)
    assert _reference(folder)[-1] == END


def test_adapters_bring_their_templates(base, adapter, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(adapter, plain)
    (plain / "chat_template.jinja").unlink()
    with LLM(str(base), adapter=adapter, merge=True, dtype="float32", show_progress=False) as llm:
        [merged] = llm.chat(CHAT, GREEDY)
    request = LoRARequest("a", 1, adapter)
    with LLM(str(base), enable_lora=True, dtype="float32", show_progress=False) as llm:
        [answer] = llm.chat(CHAT, GREEDY, lora_request=request)
        streamed = [delta.token_ids for delta in llm.stream(CHAT, GREEDY, lora_request=request)]
        [given] = llm.chat(CHAT, GREEDY, lora_request=LoRARequest("b", 2, plain), chat_template="chatml")
        assert llm.tokenizer_of(LoRARequest("b", 2, plain)) is llm.tokenizer
        [endless] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), lora_request=request)
        with pytest.raises(Exception, match="no chat template"):
            llm.chat(CHAT, GREEDY, lora_request=LoRARequest("b", 2, plain))
    expected = answer.outputs[0].token_ids
    assert (expected[-1], answer.outputs[0].finish_reason) == (END, "stop")
    assert answer.prompt_token_ids == merged.prompt_token_ids == given.prompt_token_ids
    assert expected == merged.outputs[0].token_ids == [token for ids in streamed for token in ids]
    assert len(endless.outputs[0].token_ids) == 24
    assert given.outputs[0].token_ids[: len(expected)] == expected


def test_a_token_within_answers_does_not_end_them():
    tokenizer = read_tokenizer(EMBEDDED_MODEL)
    assert tokenizer is not None
    assert answer_end_token_ids(tokenizer) == {END}
    parts = (
        "{% for m in messages %}{% if m.reasoning_content %}{{ m.reasoning_content }}<|im_end|>{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    calls = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
        "{% endfor %}"
    )
    # Solar Open's way: other names of the reasoning, and the token after each of several parts.
    other_names = tuple(parts.replace("reasoning_content", name) for name in ("reasoning", "thinking"))
    each_call = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}"
        "<|im_end|>{% endfor %}{% if not m.tool_calls %}<|im_end|>{% endif %}{% endfor %}"
    )
    one_call = each_call.replace(
        "{{ m.content", "{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ m.content"
    )
    assert answer_end_token_ids(with_template(tokenizer, one_call)) == {END}
    for source in (parts, calls, *other_names, each_call):
        assert answer_end_token_ids(with_template(tokenizer, source)) == frozenset()
    assert answer_end_token_ids(read_tokenizer(EMBEDDED_MODEL, "{{ messages[0].content }}")) == frozenset()
