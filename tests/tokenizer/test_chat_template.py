import contextlib
import json
from datetime import datetime

import psutil
import pytest
import transformers

from jaxis.errors import CheckpointError, RequestError
from jaxis.tokenizer import Tokenizer, template_process
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.config import TokenizerConfig

# Short templates that use what the published ones use: whitespace control, namespaces, macros, loop variables, slices,
# string methods, filters, tests, loop controls, tojson, raise_exception, strftime_now and generation blocks.
LLAMA31_LIKE = """{{- bos_token }}
{%- set today = date_string if date_string is defined else strftime_now("%d %b %Y") %}
{%- set first = messages[0] %}
{%- if first['role'] == 'system' %}
    {%- set rules = first['content']|trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set rules = "" %}
    {%- set turns = messages %}
{%- endif %}
<|head|>system
{% if tools is not none %}
    Functions may be called.
{% endif %}
Date: {{ today }}
{{ rules }}{{ '<|eot|>' }}
{%- for turn in turns %}
    {%- if turn.role == 'tool' %}
        {{- '<|head|>result\n' }}
        {%- if turn.content is string %}{{- turn.content }}{%- else %}{{- turn.content | tojson }}{%- endif %}
    {%- elif 'tool_calls' in turn %}
        {%- if turn.tool_calls|length != 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- for call in turn.tool_calls %}
            {{- '<|head|>call\n' + call.function.name + ' ' + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- '<|head|>' + turn['role'] + '\n' + turn['content'] | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}{{- '<|head|>assistant\n' }}{%- endif %}
"""

QWEN3_LIKE = """{%- macro text(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- 'TOOLS\n' }}{%- for tool in tools %}{{- tool | tojson ~ "\n" }}{%- endfor %}{{- '<|im_end|>' }}
{%- endif %}
{%- set state = namespace(question=-1) %}
{%- for turn in messages[::-1] %}
    {%- if state.question < 0 and turn.role == "user" %}{%- set state.question = loop.revindex0 %}{%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- if turn.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- '<|im_start|>results' }}{%- endif %}
        {{- '\n- ' + turn.content }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif turn.role == "assistant" %}
        {%- set said = text(turn.content) %}
        {%- set thought = turn.reasoning_content or '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].replace('<think>', '').strip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.question and thought %}{{- '<think>' + thought + '</think>' }}{%- endif %}
        {{- said.split('</think>')[-1].lstrip('\n') }}
        {%- for call in turn.tool_calls or [] %}
            {{- '\n<tool_call>' ~ (call.function or call).name ~ (call.function or call).arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ turn.role ~ '\n' ~ text(turn.content) ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""

MISTRAL_LIKE = """{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for turn in messages %}
    {%- if turn["role"] == "system" %}
        {%- set ignored = turn["content"] %}
        {%- continue %}
    {%- elif turn["role"] == "user" %}
        {%- if tools is defined and tools is not none and turn == users[-1] %}
            {%- for tool in tools %}
                {%- for key, value in tool.function.items() if key != "parameters" %}
                    {{- key + "=" }}{{- value | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
        {{- "[INST] " + turn["content"] + "[/INST]" }}
    {%- elif turn["role"] == "assistant" %}
        {%- generation %}{{- " " + turn["content"] | trim + eos_token }}{% set hidden = 1 %}{%- endgeneration %}
        {{- hidden is defined }}
    {%- else %}
        {{- raise_exception("no place for " + turn["role"]) }}
    {%- endif %}
{%- endfor %}
{#- a comment #}
{{- dict(a=1, b=[2]) | tojson(indent=2, sort_keys=true) }}{{ [1, "é<&'"] | tojson(separators=(",", ":")) }}
{%- for i in range(10) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
"""

TEMPLATES = {"llama31": LLAMA31_LIKE, "qwen3": QWEN3_LIKE, "mistral": MISTRAL_LIKE}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für <Ort> & Zeit",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "東京"}}}
CHATS = {
    "one question": [{"role": "user", "content": "Hi there 😀"}],
    "system and turns": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "1 < 2 & 'x'?"},
        {"role": "assistant", "content": " Yes. "},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    "absent keys": [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "because"},
    ],
    "reasoning inside": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nb"},
    ],
}
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": "or not"},
]


@pytest.fixture(scope="module")
def pair(load_pair):
    return load_pair("qwen3")


def both(pair, chat, template, **kwargs):
    """Our rendering and transformers', with the same special tokens in sight."""
    ours, theirs = pair
    kwargs = {"bos_token": "<s>", **kwargs}
    expected = theirs.apply_chat_template(
        chat, chat_template=template, tokenize=False, **{"add_generation_prompt": True, **kwargs}
    )
    return ours.apply_chat_template(chat, chat_template=template, **kwargs), expected


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"tools": TOOLS}, {"tools": []}, {"enable_thinking": False}, {"add_generation_prompt": False}],
    ids=str,
)
def test_rendering_equals_transformers(pair, chat, template, kwargs):
    ours, theirs = both(pair, CHATS[chat], TEMPLATES[template], **kwargs)
    assert ours == theirs
    if template == "llama31":
        assert datetime.now().strftime("%Y") in ours


@pytest.mark.parametrize("template", ["llama31", "qwen3"])
def test_tool_calls_render_as_in_transformers(pair, template):
    ours, theirs = both(pair, TOOL_CHAT, TEMPLATES[template], tools=TOOLS)
    assert ours == theirs
    assert '{"city": "東京"}' in ours


def test_text_parts_reach_the_template_as_in_transformers(pair):
    chat = [{"role": "user", "content": [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]}]
    ours, theirs = both(pair, chat, QWEN3_LIKE)
    assert ours == theirs
    assert "one, two" in ours


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("ending", ["The answer is", "The answer is ", "  padded \n"])
def test_continuing_the_final_message_equals_transformers(pair, template, ending):
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": ending}]
    ours, theirs = both(pair, chat, TEMPLATES[template], continue_final_message=True, add_generation_prompt=False)
    if template == "mistral":  # what this template appends does not belong to the message
        ours, theirs = ours.split("{")[0], theirs.split("{")[0]
    assert ours == theirs
    assert ours.rstrip().endswith(ending.strip())


def test_continuing_text_parts_equals_transformers(pair):
    parts = [{"type": "text", "text": "first "}, {"type": "text", "text": "second"}]
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": parts}]
    ours, theirs = both(pair, chat, QWEN3_LIKE, continue_final_message=True, add_generation_prompt=False)
    assert ours == theirs
    assert ours.endswith("first second")
    assert parts[1]["text"] == "second"


def test_encoded_chat_equals_transformers_and_has_one_bos(load_pair):
    ours, theirs = load_pair("llama3")
    chat = CHATS["system and turns"]
    template = LLAMA31_LIKE.replace("<|eot|>", "<|eot_id|>")
    expected = theirs.apply_chat_template(chat, chat_template=template, add_generation_prompt=True)["input_ids"]
    token_ids = ours.encode_chat(chat, chat_template=template)
    assert token_ids == expected
    assert token_ids.count(ours.bos_token_id) == 1
    assert token_ids[0] == ours.bos_token_id


def _write_templates(folder, source, inline=None, default_file=None, named_files=()):
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text())
    if inline is not None:
        config["chat_template"] = inline
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if default_file is not None:
        (folder / "chat_template.jinja").write_text(default_file)
    for name in named_files:
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"file {name}")


@pytest.mark.parametrize(
    ("inline", "default_file", "named_files"),
    [
        ("inline", None, ()),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], None, ()),
        ("inline", "file", ()),
        ("inline", "file", ("tool_use", "rag")),
    ],
)
@pytest.mark.parametrize("kwargs", [{}, {"tools": TOOLS}, {"tools": []}, {"chat_template": "rag"}], ids=str)
def test_the_template_is_chosen_as_in_transformers(tmp_path, family_folder, inline, default_file, named_files, kwargs):
    _write_templates(tmp_path, family_folder("qwen3"), inline, default_file, named_files)
    ours, theirs = Tokenizer.from_path(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = CHATS["one question"]
    assert ours.has_chat_template
    assert ours.apply_chat_template(chat, **kwargs) == theirs.apply_chat_template(chat, tokenize=False, **kwargs)


def test_without_a_usable_template_the_error_says_what_to_pass(tmp_path, pair, family_folder):
    assert not pair[0].has_chat_template
    with pytest.raises(RequestError, match=r"no chat template: load it with one .--chat-template FILE or NAME"):
        pair[0].apply_chat_template(CHATS["one question"])
    _write_templates(tmp_path, family_folder("qwen3"), named_files=("rag", "tool_use"))
    with pytest.raises(RequestError, match=r"choose chat_template from \['rag', 'tool_use'\]"):
        Tokenizer.from_path(tmp_path).apply_chat_template(CHATS["one question"])


ESCAPES = [
    "{{ ().__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}{{ messages.__class__.__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].content.format.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__.__init__.__globals__ }}",
    "{% set ns = namespace(__class__=1) %}{{ ns.x }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{% include '/etc/passwd' %}",
    "{{ range(10 ** 9) | list }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_sandbox_escapes_are_refused(template):
    text = ""
    with contextlib.suppress(RequestError):
        text = render_chat_template(template, CHATS["one question"])
    # Jinja turns some refused attributes into an undefined value, which prints as nothing.
    assert text == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refused the conversation: roles must alternate"),
        ("line\n{% if %}", "syntax error in line 2"),
        ("{{ messages[0].content + 1 }}", "refused the conversation: can only concatenate str"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_template_errors_are_one_line(template, message):
    with pytest.raises(RequestError, match=message) as error:
        render_chat_template(template, CHATS["one question"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list of messages, not str"),
        ({"role": "user"}, "must be a list of messages, not dict"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r'messages\[0\] needs a "role"'),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string or a list of parts, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"content\[0\] must be"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\].extra is a object; send JSON"),
    ],
)
def test_messages_of_the_wrong_form_are_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        render_chat_template("{{ messages }}", messages)


def test_contradicting_or_impossible_continuation_is_refused():
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="needs add_generation_prompt=False"):
        render_chat_template("{{ messages }}", chat, continue_final_message=True)
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(RequestError, match="leaves out the last message"):
        render_chat_template("fixed", chat, **go_on)
    with pytest.raises(RequestError, match="messages ends in a message without content"):
        render_chat_template("fixed", [{"role": "assistant", "tool_calls": [CALL]}], **go_on)


def test_tools_of_the_wrong_form_are_refused():
    with pytest.raises(RequestError, match="tools must be a list of JSON objects"):
        render_chat_template("", CHATS["one question"], tools=["get_weather"])


GREEDY = [
    ("{{ '%1000000000d' % 1 }}", "memory"),
    ("{{ '%1000000000d' | format(1) }}", "memory"),
    ("{{ '{:1000000000}'.format(1) }}", "memory"),
    ("{{ 'a' * 10 ** 9 }}", "memory"),
    ("{{ ('a\\n' * 100000) | indent(10 ** 6) }}", "memory"),
    ("{{ [1] | batch(10 ** 9, 'x') | list }}", "memory"),
    ("{{ messages | tojson(indent=10 ** 9) }}", "memory"),
    ("{{ 'a'.center(10 ** 9) }}", "memory"),
    ("{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "time"),
    ("{{ 10 ** (10 ** 8) }}", "time"),
    ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("template", "limit"), GREEDY)
def test_a_template_without_bounds_is_ended(template, limit, monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)
    monkeypatch.setattr(template_process, "MAX_MEMORY_BYTES", 200 << 20)
    monkeypatch.setattr(template_process, "MAX_CHARACTERS", 1 << 20)
    before = psutil.Process().memory_info().rss
    with pytest.raises(RequestError, match=f"the chat template (takes|writes) more than .*{limit}") as error:
        render_chat_template(template, CHATS["one question"])
    assert "\n" not in str(error.value)
    assert psutil.Process().memory_info().rss - before < 50_000_000
    monkeypatch.undo()
    assert render_chat_template("{{ messages[0].content }}", [{"role": "user", "content": "Hi"}]) == "Hi"


def test_megabytes_are_rendered():
    content = "é\U0001f600x " * 500_000
    chat = [{"role": "user", "content": content}] * 2
    assert (
        render_chat_template("{% for m in messages %}{{ m.content | trim }}{% endfor %}", chat) == 2 * content.strip()
    )


@pytest.mark.parametrize("name", ["self", "template", "messages_", "context", "environment", "loop", "caller", "where"])
def test_variables_of_any_name(name, pair):
    chat = CHATS["one question"]
    text = render_chat_template(f"{{{{ {name} is defined }}}}{{{{ messages | length }}}}", chat, **{name: 1})
    assert text == f"True{len(chat)}"
    assert pair[0].apply_chat_template(chat, chat_template="{{ 1 }}", **{name: 1}) == "1"


def test_a_template_file_is_no_link_out_of_the_folder(tmp_path):
    (tmp_path / "secret").write_text("a secret")
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "own.jinja").write_text("own")
    for path in (folder / "chat_template.jinja", folder / "additional_chat_templates" / "rag.jinja"):
        path.symlink_to(folder / "own.jinja")
        assert "own" in TokenizerConfig.from_folder(folder).chat_templates.values()
        path.unlink()
        path.symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointError, match=r"is a link to .*secret, which is not in the folder"):
            TokenizerConfig.from_folder(folder)
        path.unlink()


def test_a_template_file_in_the_hubs_cache_is_a_link_to_its_blobs(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("own")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/abc")
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    for folder in (snapshot, link):
        assert TokenizerConfig.from_folder(folder).chat_templates == {"default": "own"}


def test_a_template_file_of_megabytes_is_refused(tmp_path):
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(120_000_000)
    with pytest.raises(CheckpointError, match="has 120000000 bytes, and a chat template at most 1048576"):
        TokenizerConfig.from_folder(tmp_path)
