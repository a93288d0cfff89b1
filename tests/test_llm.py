"""LLM.generate and LLM.chat: what they take, what they return, what they refuse."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxis import LLM, RequestOutput, SamplingParams
from jaxis.errors import ConfigError, EngineError, RequestError
from tests.support.tiny_checkpoints import variant

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEXT = "the cat reads"


@pytest.fixture
def answer(llm):
    """GREEDY's tokens for a prompt of ids."""
    return lambda token_ids: llm.generate(token_ids, GREEDY)[0].outputs[0].token_ids


def check_usable(llm):
    """The LLM still answers."""
    [output] = llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


def test_every_form_of_prompt(batching_llm, answer):
    ids = batching_llm.tokenizer.encode(TEXT)
    prompts = [
        TEXT,
        ids,
        tuple(ids),
        np.asarray(ids),
        [np.int64(i) for i in ids],
        {"prompt": TEXT},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.asarray(ids, np.int32), "cache_salt": "a"},
    ]
    outputs = batching_llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == [TEXT, None, None, None, None, TEXT, None, None]
    expected = answer(ids)
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.prompt_token_ids == ids
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)
        assert output.finished
        assert output.outputs[0].finished
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == batching_llm.tokenizer.decode(expected)


@pytest.mark.parametrize("prompt", [TEXT, [5, 6, 7], np.asarray([5, 6, 7]), {"prompt": TEXT}, (5, 6, 7)])
def test_one_prompt_is_a_batch_of_one(llm, prompt):
    assert len(llm.generate(prompt, GREEDY)) == 1


def test_no_prompts(llm):
    assert llm.generate([], GREEDY) == []
    assert llm.generate([], []) == []
    assert llm.chat([], GREEDY) == []


def test_outputs_come_in_the_prompts_order(batching_llm, answer):
    """They finish in another: the first prompts run longest."""
    prompts = [[i + 1] * 3 for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=13 - i, ignore_eos=True) for i in range(12)]
    outputs = batching_llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(13, 1, -1))
    assert [output.outputs[0].token_ids[:2] for output in outputs] == [answer(prompt)[:2] for prompt in prompts]


def test_tokenizer_and_limits(llm):
    assert llm.max_model_len == 1024
    assert llm.tokenizer.decode(llm.tokenizer.encode(TEXT)) == TEXT


def test_default_parameters_run_to_the_end_of_the_context(start_llm):
    with start_llm(max_model_len=16) as llm:
        [output] = llm.generate([1, 2, 3])
    assert len(output.outputs[0].token_ids) == 13


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is NoneType"),
        (5, "prompts is int"),
        (b"abc", "prompts is bytes"),
        ([None], "the prompt is NoneType"),
        ([TEXT, 5], "prompt 1 of 2 is int"),
        ([b"abc"], "the prompt is bytes"),
        ([1.5, 2.5], "prompt 0 of 2 is float"),
        ("", "empty"),
        ([[]], "empty"),
        ([TEXT, []], "prompt 1 of 2: .*empty"),
        ([1, True], "holds True"),
        ([[1, "a"]], "holds 'a'"),
        ([[1, 2], [1, 512]], "prompt 1 of 2: .* token 512; the model's token ids are 0 to 511"),
        ([1, -1], "token -1"),
        ([1] * 1024, "1024 tokens, and max_model_len=1024"),
        ([TEXT, [1] * 2000], "prompt 1 of 2: .*2000 tokens"),
        ({"text": TEXT}, "unknown keys"),
        ([{"role": "user", "content": TEXT}], r"call llm\.chat\(messages\)"),
        ({}, "exactly one of"),
        ({"prompt": TEXT, "prompt_token_ids": [1]}, "exactly one of"),
        ({"prompt": [1, 2]}, "'prompt' is list; expected a string"),
        ({"prompt_token_ids": TEXT}, "'prompt_token_ids' is str; expected a list"),
        ({"prompt": TEXT, "cache_salt": 5}, "cache_salt 5"),
    ],
)
def test_wrong_prompts_are_refused_and_nothing_is_queued(llm, prompts, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, GREEDY)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished
    check_usable(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": [GREEDY]}, "sampling_params has 1 values for 2 prompts"),
        ({"sampling_params": []}, "sampling_params has 0 values for 2 prompts"),
        ({"sampling_params": {"temperature": 0}}, "must be of type SamplingParams"),
        ({"sampling_params": [GREEDY, None]}, "must be of type SamplingParams"),
        ({"priority": [1]}, "priority has 1 values for 2 prompts"),
        ({"priority": [1, None]}, "must be of type integer"),
        ({"priority": "1"}, "must be of type integer"),
        ({"sampling_params": SamplingParams(max_tokens=4, stop_token_ids=[512])}, "prompt 0 of 2: stop_token_ids"),
    ],
)
def test_wrong_arguments_are_refused(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([TEXT, TEXT], **{"sampling_params": GREEDY} | arguments)
    assert not llm.engine.has_unfinished


def test_logprobs_of_the_whole_vocabulary_are_a_distribution_that_has_those_of_the_likeliest(llm):
    params = [SamplingParams(max_tokens=3, seed=1, logprobs=count) for count in (-1, 5)]
    every, few = (output.outputs[0] for output in llm.generate([TEXT, TEXT], params))
    for all_tokens, best in zip(every.logprobs, few.logprobs, strict=True):
        assert len(all_tokens) == 512
        assert sum(math.exp(entry.logprob) for entry in all_tokens.values()) == pytest.approx(1, abs=1e-5)
        assert sorted(entry.rank for entry in all_tokens.values())[:3] == [1, 2, 3]
        assert {token: all_tokens[token].logprob for token in best} == {t: each.logprob for t, each in best.items()}


def test_more_tokens_than_the_context_end_there(llm):
    [output] = llm.generate([1] * 1020, SamplingParams(temperature=0, max_tokens=100))
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


def test_lower_priority_values_are_served_first(llm):
    """One runs at a time."""
    served = []
    dispatch = llm.engine.runner.dispatch

    def record(output, sampling):
        served.extend(entry.sequence.prompt_token_ids[0] for entry in output.scheduled)
        return dispatch(output, sampling)

    llm.engine.runner.dispatch = record
    try:
        llm.generate([[1, 2], [3, 4], [5, 6]], GREEDY, priority=[2, 3, 1])
    finally:
        llm.engine.runner.dispatch = dispatch
    assert list(dict.fromkeys(served)) == [5, 1, 3]


def test_prefixes_are_shared_under_the_same_salt_only(llm):
    ids = list(range(100, 150))

    def cached(salt):
        prompt = {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})
        return llm.generate(prompt, GREEDY)[0].num_cached_tokens

    assert [cached(salt) for salt in (None, None, "a", "b", "a", "", None)] == [0, 48, 0, 0, 48, 0, 48]


def test_completions_of_one_prompt_share_it(batching_llm):
    params = SamplingParams(n=4, temperature=3.0, seed=1, max_tokens=6)
    outputs = batching_llm.generate([list(range(50)), [4, 5]], params)
    for output in outputs:
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4


CONVERSATION = [{"role": "system", "content": "be kind"}, {"role": "user", "content": TEXT}]


def test_chat(llm, answer):
    text = f"<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
    [output] = llm.chat(CONVERSATION, GREEDY)
    assert output.prompt == text
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert output.outputs[0].token_ids == answer(output.prompt_token_ids)


def test_chat_of_many_conversations(batching_llm):
    conversations = [CONVERSATION, CONVERSATION[1:], [{"role": "user", "content": "a question"}]]
    together = batching_llm.chat(conversations, GREEDY)
    alone = [batching_llm.chat(conversation, GREEDY)[0] for conversation in conversations]
    assert [output.prompt for output in together] == [output.prompt for output in alone]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]


def test_chat_options(llm):
    begun = [*CONVERSATION, {"role": "assistant", "content": "the ans"}]
    [output] = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt.endswith("<|im_start|>assistant\nthe ans")
    template = "{{ messages[0].content }}|{{ tools | length }}|{{ mood }}"
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    [output] = llm.chat(
        CONVERSATION, GREEDY, chat_template=template, tools=tools, chat_template_kwargs={"mood": "good"}
    )
    assert output.prompt == "be kind|1|good"


@pytest.mark.parametrize("messages", [TEXT, None, [TEXT], [[TEXT]], [{"content": TEXT}], {"role": "user"}, [[]]])
def test_chat_refuses_what_is_no_conversation(llm, messages):
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert "\n" not in str(caught.value)


def test_without_a_chat_template(checkpoint, tmp_path, start_llm):
    files = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}
    with start_llm(variant(tmp_path / "plain", checkpoint(), files=files)) as llm:
        with pytest.raises(RequestError, match="chat template"):
            llm.chat(CONVERSATION, GREEDY)
        check_usable(llm)


def test_without_a_tokenizer(checkpoint, tmp_path, start_llm, answer):
    folder = variant(tmp_path / "ids", checkpoint(), files={"tokenizer.json": None, "tokenizer_config.json": None})
    with start_llm(folder) as llm:
        assert llm.tokenizer is None
        [output] = llm.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=8, logprobs=1))
        assert output.outputs[0].token_ids == answer([3, 4, 5])
        assert output.outputs[0].text == ""
        assert {entry.decoded_token for step in output.outputs[0].logprobs for entry in step.values()} == {None}
        for call in (lambda: llm.generate(TEXT), lambda: llm.chat(CONVERSATION), lambda: llm.stream(TEXT)):
            with pytest.raises(RequestError, match="tokenizer"):
                call()
        for params in ({"stop": ["a"]}, {"bad_words": ["a"]}):
            with pytest.raises(RequestError, match="tokenizer"):
                llm.generate([1], SamplingParams(**params))
        check_usable(llm)


def test_closing(start_llm):
    with start_llm() as llm:
        stream = llm.stream([1, 2], GREEDY)
        next(stream)
    for call in (
        lambda: llm.generate(TEXT, GREEDY),
        lambda: llm.chat(CONVERSATION, GREEDY),
        lambda: llm.stream(TEXT, GREEDY),
        lambda: llm.compute_logits([1]),
        lambda: next(stream),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    llm.close()


def test_generating_on_another_thread(llm, answer):
    """It does so where Ctrl-C cannot be held back."""
    with ThreadPoolExecutor(1) as executor:
        [output] = executor.submit(llm.generate, [3, 4, 5], GREEDY).result()
    assert output.outputs[0].token_ids == answer([3, 4, 5])


def test_it_is_printed_with_what_it_runs(llm):
    assert re.fullmatch(r"LLM\('.+', \w+For\w+, max_model_len=\d+\)", repr(llm))


def test_unknown_engine_argument():
    with pytest.raises(TypeError, match="gpu_memory_utilisation"):
        LLM("anywhere", gpu_memory_utilisation=0.9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_length": 100}, "there is no argument 'max_length': did you mean max_model_len"),
        ({"gpu_memory": 0.5}, "did you mean gpu_memory_utilization"),
        ({"temperature": 0.5}, r"temperature is of each request: give it in SamplingParams\(temperature=\.\.\.\)"),
        ({"dtype": "fp16"}, "dtype='fp16' must be one of .*: did you mean float16"),
        ({"quantization": "q4"}, "quantization='q4' is neither .*: did you mean int4"),
        ({"speculative_config": {"metod": "ngram"}}, "did you mean method"),
        ({"quantization": [{"module_path": ".*", "weight_qtyp": "int8"}]}, "did you mean weight_qtype"),
    ],
)
def test_a_misspelt_argument_names_the_one_that_was_meant(arguments, said):
    with pytest.raises(ConfigError, match=said):
        LLM(None, **arguments)
