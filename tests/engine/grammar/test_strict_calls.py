"""Calls held to a grammar in free text, through the whole engine: they fit, whatever is beside them."""

import json

import jsonschema
import pytest

from jaxis import LLM, SamplingParams, StructuredOutputs
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.tool_choice import calls_grammar
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.tools import FunctionTool
from tests.support.drafters import drafters, drafting

SCHEMA = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
TOOL = FunctionTool("get_weather", parameters=SCHEMA | {"additionalProperties": False})
OFFERED = {"type": "function", "function": {"name": TOOL.name, "parameters": TOOL.parameters}}
QUESTIONS = ("Weather in Paris?", "What is the capital of France?", "Weather in Rome?")


@pytest.fixture(scope="module")
def llm():
    """The embedded model, which calls by itself; up to 4 requests at a time."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 512, "kv_cache_memory": "32MiB"}
    with LLM(show_progress=False, **sizes) as embedded:
        yield embedded


def test_they_fit_and_tokens_are_the_same_in_any_batch_and_with_drafts(llm):
    parser = get_tool_parser("hermes")
    grammar = StructuredOutputs(grammar=calls_grammar(parser, [TOOL], llm.tokenizer, must_call=False))
    prompts = [
        llm.tokenizer.encode(
            llm.tokenizer.apply_chat_template([{"role": "user", "content": question}], tools=[OFFERED]),
            add_special_tokens=False,
        )
        for question in QUESTIONS
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=grammar),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=grammar),
        SamplingParams(temperature=0.5, seed=4, max_tokens=40, structured_outputs=grammar),
    ]

    def tokens(prompts, *params):
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, list(params), progress=False)]

    alone = [tokens([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    free = tokens(prompts[:2], *(SamplingParams(temperature=0.0, max_tokens=40) for _ in range(2)))
    assert free[0] != alone[0]
    assert free[1] == alone[1]  # an answer without a call is the one of a model that is held to nothing
    calls = [
        parse_output(OutputParser(parser, None, tools=[TOOL]), llm.tokenizer.decode(found)).tool_calls
        for found in alone
    ]
    assert calls[0]
    assert not calls[1]
    for call in (call for found in calls for call in found):
        assert call.name == TOOL.name
        assert '"zone"' in call.arguments
        assert '"city"' not in call.arguments  # which the model would say
        if call.status == "complete":  # it may also be cut off: the model likes white space where it is not at home
            jsonschema.validate(json.loads(call.arguments), TOOL.parameters)
    beside = SamplingParams(temperature=0.9, seed=1, max_tokens=40)
    assert tokens([*prompts, prompts[0]], *params, beside)[:3] == alone
    answers = {tuple(prompt): [found] for prompt, found in zip(prompts, alone, strict=True)}
    with drafting(llm.engine, drafters(answers, 300)["changing"], 5) as speculation:
        assert tokens([*prompts, prompts[0]], *params, beside)[:3] == alone
    assert speculation.counts.num_drafts > 0
