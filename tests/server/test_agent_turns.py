"""The prefix cache as agents need it: a request repeats the tokens of the last one, and none of them is read again."""

import copy
import itertools
from pathlib import Path
from random import Random

import anthropic
import pytest

import jaxis
from jaxis import SamplingParams
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.server.anthropic.message_job import message_job
from jaxis.server.anthropic.message_schema import MessagesRequest
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.ollama import ollama_job
from jaxis.server.ollama.ollama_schema import OllamaChatRequest
from jaxis.server.openai.chat_job import chat_job
from jaxis.server.openai.chat_schema import ChatCompletionRequest
from jaxis.server.openai.response_job import response_job
from jaxis.server.openai.response_schema import ResponseRequest
from jaxis.tokenizer import Tokenizer
from tests.server.agent_conversations import AgentConversation
from tests.support.agent_templates import AGENT_TEMPLATES

ASSETS = Path(jaxis.__file__).parent / "assets"
TINY = Tokenizer.from_path(ASSETS / "tiny")
# DeepSeek's join an answer of a tool with the question after it, and leave out what was thought before.
PATHS = [path for path in (ASSETS / "chat_templates").glob("*.jinja") if not path.stem.startswith("deepseek")]
BUILT_IN = {path.stem: path.read_text(encoding="utf-8") for path in PATHS}
TEMPLATES = {"embedded": TINY.chat_templates["default"], **AGENT_TEMPLATES, **BUILT_IN}
NUM_TURNS = 1000


def messages_prompt(conversation, model):
    return message_job(MessagesRequest.model_validate(conversation.messages_request()), model)


def chat_prompt(conversation, model):
    return chat_job(ChatCompletionRequest.model_validate(conversation.chat_request()), model)


def responses_prompt(conversation, model):
    return response_job(ResponseRequest.model_validate(conversation.responses_request()), model)


def ollama_prompt(conversation, model):
    return ollama_job.chat_job(OllamaChatRequest.model_validate(conversation.ollama_request()), model)


PROTOCOLS = {
    "messages": messages_prompt,
    "chat": chat_prompt,
    "responses": responses_prompt,
    "ollama": ollama_prompt,
}


NUM_TURNS_EACH = -(-NUM_TURNS // (len(PROTOCOLS) * len(TEMPLATES)))


def common_length(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_begins_with_the_tokens_of_the_turn_before(protocol, template):
    tokenizer = copy.copy(TINY)
    tokenizer.chat_templates = {"default": TEMPLATES[template]}
    tokenizer.special_tokens = {"bos_token": "<s>", **TINY.special_tokens}
    model = ServedModel(
        names=("jaxis-tiny",),
        tokenizer=tokenizer,
        default_sampling_params=SamplingParams(),
        grammar_compiler=None,
        parsers=ModelParsers.select(tokenizer, None, tool="hermes"),
    )
    question = [{"role": "user", "content": "x"}]
    closed = tokenizer.apply_chat_template(question, add_generation_prompt=False)
    opening = tokenizer.apply_chat_template(question).removeprefix(closed)

    def prompt_of(conversation):
        [prompt] = PROTOCOLS[protocol](conversation, model).tokenize()
        return prompt

    num_turns, seeds = 0, itertools.count()
    while num_turns < NUM_TURNS_EACH:
        with_tools = "tool_calls" in TEMPLATES[template]
        conversation = AgentConversation(Random(f"{template} {next(seeds)}"), with_tools=with_tools)
        last = asked = prompt_of(conversation)
        for _ in range(12):
            is_question = conversation.grow()
            prompt = prompt_of(conversation)
            # Such a template writes the answers to an older question anew.
            kept = (asked if is_question and template == "drops_reasoning" else last).text.removesuffix(opening)
            assert prompt.text.startswith(kept)
            num_tokens = len(tokenizer.encode(kept, add_special_tokens=False))
            assert common_length(last.token_ids, prompt.token_ids) >= num_tokens
            last = prompt
            asked = prompt if is_question else asked
            num_turns += 1


def test_no_token_that_is_cached_is_read_again(server, built_engine):
    block_size = built_engine.engine.scheduler.block_manager.block_size
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
    turns, last_ids, num_read_again = [], [], 0
    model = ServedModel(
        names=("jaxis-tiny",),
        tokenizer=TINY,
        default_sampling_params=SamplingParams(),
        grammar_compiler=None,
        parsers=ModelParsers.select(TINY, None),
    )
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        for number in range(10):
            text = f"What is the capital of France, and what is {number} and {number}?"
            turns.append({"role": "user", "content": [{"type": "text", "text": text}]})
            billing = f"x-anthropic-billing-header: cc_version=2.1.330.{number:03x}; cc_entrypoint=cli;"
            system = [{"type": "text", "text": part} for part in (billing, "You are an agent.")]
            body = {"model": "jaxis-tiny", "max_tokens": 12, "system": system, "messages": turns, "tools": tools}
            [prompt] = message_job(MessagesRequest.model_validate(body), model).tokenize()
            ids = prompt.token_ids
            answer = client.messages.create(**body)
            usage = answer.usage
            assert usage.input_tokens + usage.cache_read_input_tokens == len(ids)
            could_be_cached = common_length(last_ids, ids) // block_size * block_size
            num_read_again += max(0, could_be_cached - usage.cache_read_input_tokens)
            assert could_be_cached > len(last_ids) - 2 * block_size
            turns[-1] = {"role": "user", "content": text}
            turns.append({"role": "assistant", "content": [{"type": "text", "text": answer.content[0].text}]})
            last_ids = ids
    assert num_read_again == 0
