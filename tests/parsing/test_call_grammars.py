"""Whatever a model samples under the grammar of its format's calls is read back as calls that fit their schemas."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
import tokenizers

from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.token_mask import is_allowed
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.parsing.tool_choice import calls_grammar
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError, special_tokens
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.structured_outputs import StructuredOutputs
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template
from tests.parsing.random_schemas import random_tools
from tests.parsing.test_tagged_values import TAGS, written
from tests.parsing.tool_call_formats import FORMATS

EOS = "<|eos|>"
NOW = FunctionTool("now")
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "near": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "box": {"type": "object", "properties": {"x": {"type": "number"}}},
}
# ruff: noqa: RUF001 (the bars are DeepSeek's)
MARKERS = (
    r"<\|[^|<>]*\|>",
    r'<\|"\|>',
    r"<\|[a-z_]+>|<[a-z_]+\|>",
    r"<｜[^｜]*｜>|｜DSML｜",
    r"\[[A-Z_]{4,}\]",
    r"<(?:start|end)_function_[a-z]+>|<escape>",
    r"</?(?:tool_call|arg_key|arg_value|minimax:tool_call|seed:tool_call|tool_sep|tool_calls)>",
)
# Rendering removes the line breaks after their blocks, and a template that only mentions another marker.
TRIMMED = {
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "gemma3",
    "glm",
    "minicpm",
    "hy_v3",
    "hy_v4",
    "cohere",
    "command_r",
    "granite_33",
}
K3_OPENING = "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>"  # before its grammar begins
PYTHON = {"seed_oss"}  # the template writes lists and booleans as Python does
# What ends a turn ends the answer, and is in no grammar.
ENDS = (
    "<|content_model_end_sampling|>",
    "<|close|>message<|sep|><|end_of_msg|>",
    "</s>",
    "<|call|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<|tool_response>",
    "[e~[",
    "<|eot|>",
    "<seed:eos>",
    "<|assistant_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<start_function_response>",
    "<|python_end|>",
)
# How a call begins in formats whose whole answer has a form: messages with headers, or text that begins with no brace.
BEGINNINGS = {
    "kimi_k3": '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="{}" index="1"<|sep|>',
    "openai": "<|channel|>commentary to=functions.{}",
    "muse_glimmer": " to={}<|message|>",
    "llama3_json": "{{",
    "pythonic": "[",
}
PIECES = ["the", "ing", '": ', '", "', '"}', "}}", "\n\n", "=[", "</", "<p", "12", "é", "日", "name", "\\n", "> <"]


def tokenizer_of(markers):
    """A tokenizer of characters, some pieces of text, and these special tokens."""
    plain = [chr(code) for code in range(32, 127)] + ["\n", "\t", *PIECES]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(dict.fromkeys([EOS, *plain, *markers]))}, [])
    )
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([EOS, *markers])
    return Tokenizer(backend)


def special_markers(form):
    """The markers of a format's template that are special tokens, if its parser expects any to be."""
    if not get_tool_parser(form.tool).needs_special_tokens:
        return []
    return list(dict.fromkeys(re.findall("|".join(MARKERS), form.template)))


def sample(grammar, tokenizer, rng, max_tokens):
    """A random answer, and whether it ended by itself."""
    token_ids = []
    ended = sample_from(grammar.new_matcher(), token_ids, tokenizer, rng, max_tokens)
    return token_ids, ended


def sample_from(matcher, token_ids, tokenizer, rng, max_tokens):
    """Continues an answer at random, and says whether it ended: in the end, tokens that may end it are preferred."""
    eos, start = tokenizer.token_to_id(EOS), len(token_ids)
    matcher.follow(token_ids)
    while len(token_ids) < start + max_tokens and not matcher.is_complete:
        allowed = allowed_ids(matcher)
        assert len(allowed), (matcher.error, tokenizer.decode(token_ids, skip_special_tokens=False))
        closing = [i for i in allowed if tokenizer.token_text(int(i))[:1] in '"}])<>`|[\n']
        if eos in allowed and (rng.random() < 0.3 or len(token_ids) > start + 200):
            return True  # the token that ends it belongs to no text
        pool = closing if closing and rng.random() < 0.25 + (len(token_ids) - start) / 400 else allowed
        token_ids.append(int(rng.choice(pool)))
        matcher.follow(token_ids)
    if token_ids[-1:] == [eos]:
        token_ids.pop()
    return matcher.is_complete


def allowed_ids(matcher):
    """The tokens that may come next."""
    return np.flatnonzero(np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little"))


def accepts(grammar, tokenizer, text):
    """True if an answer may be this string, and end there."""
    matcher = grammar.new_matcher()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for count, token_id in enumerate([*token_ids, tokenizer.token_to_id(EOS)]):
        matcher.follow(token_ids[:count])
        if matcher.is_complete and count == len(token_ids):
            return True
        if not is_allowed(matcher.token_mask(), token_id):
            return False
    return True


def check(form, tools, rng, tokenizer, compiler, count=1, **options):
    parser = get_tool_parser(form.tool)
    source = calls_grammar(parser, tools, tokenizer, **options)
    grammar = compiler.compile(StructuredOutputs(grammar=source))
    for _ in range(count):
        token_ids, ended = sample(grammar, tokenizer, rng, 600)
        text = tokenizer.decode(token_ids, skip_special_tokens=not parser.needs_special_tokens)
        reasoning = get_reasoning_parser(form.reasoning) if form.reasoning and parser.writes_reasoning else None
        output = parse_output(OutputParser(parser, reasoning, tools=tools), text)
        check_calls(output.tool_calls, tools, text)
        yield text, output, ended


def check_calls(calls, tools, text):
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in calls:
        assert call.name in schemas, text
        if call.status == "complete":
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def compiler_of(form):
    tokenizer = tokenizer_of(special_markers(form))
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.token_to_id(EOS)])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_must_come_parse_and_fit(name):
    form, rng = FORMATS[name], random.Random(name)
    tokenizer, compiler = compiler_of(form)
    num_ended = 0
    for _ in range(3):
        for text, output, ended in check(form, random_tools(rng), rng, tokenizer, compiler, 2, must_call=True):
            if ended:
                num_ended += 1
                assert output.tool_calls, text
                assert {call.status for call in output.tool_calls} == {"complete"}, text
                assert not output.content.strip() or get_tool_parser(form.tool).writes_reasoning, text
    assert num_ended >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_one(name):
    form, rng = FORMATS[name], random.Random(name)
    tokenizer, compiler = compiler_of(form)
    options = {"must_call": True, "max_calls": 1}
    for text, output, ended in check(form, random_tools(rng), rng, tokenizer, compiler, 3, **options):
        assert not ended or len(output.tool_calls) == 1, text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_free_text_fit_and_free_text_is_free(name):
    form, rng = FORMATS[name], random.Random(name)
    tokenizer, compiler = compiler_of(form)
    tools = random_tools(rng)
    for text, output, ended in check(form, tools, rng, tokenizer, compiler, 3, must_call=False):
        assert not ended or all(call.status == "complete" for call in output.tool_calls), text
    grammar = compiler.compile(
        StructuredOutputs(grammar=calls_grammar(get_tool_parser(form.tool), tools, tokenizer, must_call=False))
    )
    starts = {"openai": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}
    assert accepts(grammar, tokenizer, starts.get(form.tool, "") + "Hi! a < b, [1] and <x> are no calls: {}.")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_fits_its_schema_or_calls(name):
    form, rng = FORMATS[name], random.Random(name)
    tokenizer, compiler = compiler_of(form)
    answer = '%json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    starts = {"openai": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}
    source = calls_grammar(get_tool_parser(form.tool), [NOW], tokenizer, must_call=False, answer=answer)
    grammar = compiler.compile(StructuredOutputs(grammar=source))
    assert accepts(grammar, tokenizer, starts.get(form.tool, "") + '{"a": 1}')
    assert not accepts(grammar, tokenizer, starts.get(form.tool, "") + '{"a": "1"}')
    assert not accepts(grammar, tokenizer, starts.get(form.tool, "") + "Hi")
    for text, output, ended in check(form, [NOW], rng, tokenizer, compiler, 4, must_call=False, answer=answer):
        assert not ended or output.tool_calls or json.loads(output.content)["a"] is not None, text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - TRIMMED))
def test_what_the_template_writes_is_allowed(name):
    """A call in the conversation's past looks as the grammar lets the model write one."""
    form = FORMATS[name]
    tokenizer, compiler = compiler_of(form)
    tool = FunctionTool("look_up", parameters={"type": "object", "properties": PROPERTIES, "required": ["city"]})
    arguments = {"city": "Rome", "days": 3} | ({} if name in PYTHON else {"near": True, "box": {"x": 1.5}})
    function = {"name": tool.name, "arguments": json.dumps(arguments)}
    call = {"id": f"functions.{tool.name}:0", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [call]}
    messages = with_template_arguments([{"role": "user", "content": "?"}, turn], form.template)
    text = render_chat_template(form.template, messages, add_generation_prompt=False).removeprefix("USER")
    text = text.removeprefix("<think></think>").removeprefix(K3_OPENING)
    text = text.removeprefix(f"<|message_model|>{tool.name}").lstrip("\n")
    text = re.sub(r'(?:\n<think></think>|, "id": "[^"]*")', "", text)
    for end in ENDS:
        text = text.removesuffix(end)
    grammar = compiler.compile(
        StructuredOutputs(grammar=calls_grammar(get_tool_parser(form.tool), [tool], tokenizer, must_call=True))
    )
    assert accepts(grammar, tokenizer, text.strip("\n") if form.tool != "muse_glimmer" else text)


@pytest.mark.parametrize("key", ["minProperties", "anyOf", "patternProperties"])
def test_what_a_format_cannot_write_is_said(key):
    tool = FunctionTool("f", parameters={"type": "object", "properties": {}, key: 1})
    with pytest.raises(UnwritableCallError, match=key):
        calls_grammar(get_tool_parser("qwen3_coder"), [tool], tokenizer_of([]), must_call=True)
    calls_grammar(get_tool_parser("hermes"), [tool], tokenizer_of([]), must_call=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_masked_before_a_call_and_from_every_opener_on_only_calls_that_fit(name):
    form, rng = FORMATS[name], random.Random(name)
    parser, beginning = get_tool_parser(form.tool), BEGINNINGS.get(form.tool)
    tokenizer, compiler = compiler_of(form)
    tools = random_tools(rng)
    grammar = compiler.compile(StructuredOutputs(grammar=calls_grammar(parser, tools, tokenizer, must_call=False)))
    writer = CallGrammar(tools, special_tokens(tokenizer))
    written = parser.opening_of(writer)
    inner = {
        tokenizer.token_to_id(opener) for opener in parser.openers if parser.write_call_after(opener, writer) is None
    }
    starts = dict.fromkeys([written, *parser.openers]) if beginning is None else [beginning.format(tools[0].name)]
    markers = {tokenizer.token_to_id(start) for start in (*starts, *parser.call_markers, "｜DSML｜")}
    free = [i for i in range(1, tokenizer.vocab_size) if i not in markers]
    for start in starts:
        for _ in range(2):
            token_ids, matcher = [], grammar.new_matcher()
            while beginning is None and len(token_ids) < 20:
                assert set(range(tokenizer.vocab_size)) - {*allowed_ids(matcher)} <= inner
                token_ids.append(rng.choice(free))
                matcher.follow(token_ids)
            if not follow_text(matcher, token_ids, start, tokenizer):
                assert start != written  # it comes only inside of what another marker opens
                continue
            ended = sample_from(matcher, token_ids, tokenizer, rng, 600)
            text = tokenizer.decode(token_ids, skip_special_tokens=not parser.needs_special_tokens)
            calls = parse_output(OutputParser(parser, None, tools=tools), text).tool_calls
            assert calls or not ended, (start, text)
            check_calls(calls, tools, text)
            assert not ended or all(call.status == "complete" for call in calls), text


def follow_text(matcher, token_ids, text, tokenizer):
    """Continues an answer by this text, and says whether all of it was allowed."""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in allowed_ids(matcher):
            return False
        token_ids.append(token_id)
        matcher.follow(token_ids)
    return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TAGS)
def test_a_string_behind_a_reference_is_written_as_it_is_read(name):
    """It has no quotation marks, and cannot begin another of the function's arguments."""
    parser = get_tool_parser(name)
    tokenizer = tokenizer_of([])
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.token_to_id(EOS)])
    definitions = {"Zip": {"type": "string"}, "Args": {"properties": {"unit": {"enum": ["1", "m/s"]}}}}
    properties = {"zip": {"$ref": "#/$defs/Zip"}, "note": {"allOf": [{"type": "string"}, {"minLength": 1}]}}
    schema = {"type": "object", "properties": properties, "allOf": [{"$ref": "#/$defs/Args"}], "$defs": definitions}
    tools = [FunctionTool("f", parameters=schema | {"required": ["zip"]})]
    grammar = compiler.compile(StructuredOutputs(grammar=calls_grammar(parser, tools, tokenizer, must_call=True)))
    other = parser.argument_tags[0] + "note" + parser.argument_tags[1]
    unknown = parser.argument_tags[0] + "rate" + parser.argument_tags[1]
    for value, fits in (("12345", True), (f"a {unknown}", True), (f"a {other}", False)):
        arguments = {"zip": value, "note": "null", "unit": "1"}
        text = written(name, *arguments.items()).removesuffix("<|eot|>")
        assert accepts(grammar, tokenizer, text) == fits, text
        if fits:
            [call] = parse_output(OutputParser(parser, None, tools=tools), text).tool_calls
            assert (json.loads(call.arguments), call.status) == (arguments, "complete")
