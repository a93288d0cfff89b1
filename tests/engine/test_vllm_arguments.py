"""vLLM's arguments of `LLM`, `generate` and `chat`."""

import functools
from pathlib import Path

import pytest

from jaxis import SamplingParams
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.vllm_arguments import translate
from jaxis.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
# What users of vLLM give, at values that change no answer; a tokenizer beside it is the model's.
USUAL = {
    "tokenizer": "org/model",
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": True,
    "tensor_parallel_size": 1,
    "dtype": "half",
    "quantization": None,
    "revision": "main",
    "tokenizer_revision": "main",
    "seed": 0,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": None,
    "disable_log_stats": False,
    "limit_mm_per_prompt": {"image": 0},
    "runner": "generate",
    "download_dir": "/models",
    "hf_token": "secret",
    "load_format": "safetensors",
}


def test_the_usual_arguments_become_those_of_the_engine():
    translated = translate("org/model", USUAL)
    assert EngineArgs(model="org/model", **translated.arguments) == EngineArgs(
        model="org/model",
        dtype="float16",
        revision="main",
        max_model_len=512,
        max_num_seqs=8,
        cache_dir="/models",
        token="secret",
        limit_mm_per_prompt={"image": 0},
    )
    assert translated.without_effect == ("trust_remote_code", "swap_space", "enforce_eager", "enable_chunked_prefill")


def test_own_arguments_are_as_they_are():
    own = {"dtype": "bfloat16", "kv_cache_memory": "1GiB", "block_size": 32, "quantization": "int8", "token": "a"}
    assert translate("org/model", own) == translate(None, own)
    assert translate("org/model", own).arguments == own


def test_other_spellings():
    import torch

    assert translate(None, {"dtype": torch.bfloat16}).arguments == {"dtype": "bfloat16"}
    assert translate(None, {"dtype": "float"}).arguments == {"dtype": "float32"}
    assert translate(None, {"max_model_len": -1}).arguments == {"max_model_len": None}
    assert translate(None, {"seed": None, "block_size": None}).arguments == {}
    assert translate(None, {"hf_token": True}).arguments == {}
    assert translate(None, {"kv_cache_memory_bytes": 1 << 30}).arguments == {"kv_cache_memory": 1 << 30}
    rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert translate(None, {**rope, "hf_overrides": {"a": 1}}).arguments == {"hf_overrides": {"a": 1, **rope}}
    assert translate("/m", {"tokenizer": Path("/m")}).arguments == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": "org/other"}, "tokenizer='org/other' is not supported"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode='mistral' is not supported, only 'auto' or"),
        ({"tokenizer_revision": "v2"}, "tokenizer_revision='v2' is not supported"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init=True is not supported"),
        ({"data_parallel_rank": 1}, "data_parallel_rank=1 is not supported, only None: one LLM has all ranks"),
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb=True is not supported"),
        ({"all2all_backend": "pplx"}, "all2all_backend='pplx' is not supported, only None: experts are found by"),
        ({"enable_eplb": True}, "enable_eplb=True is not supported, only False: each expert lies on one device"),
        ({"runner": "pooling"}, "runner='pooling' is not supported"),
        ({"generation_config": "vllm"}, "generation_config='vllm' is not supported"),
        ({"override_generation_config": {"top_k": 1}}, "override_generation_config=.* is not supported"),
        ({"logits_processors": [print]}, "logits_processors=.* is not supported"),
        ({"disable_sliding_window": True}, "disable_sliding_window=True is not supported"),
        ({"token": "a", "hf_token": "b"}, "hf_token and token are the same: give one"),
        ({"rope_theta": 1e6, "hf_overrides": {"rope_theta": 1e5}}, "rope_theta is given twice"),
    ],
)
def test_an_argument_that_would_change_answers_is_refused_by_its_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        translate("org/model", arguments)


def test_an_unknown_argument_stays_a_type_error(start_llm, checkpoint):
    with pytest.raises(TypeError, match="no_such_argument"):
        start_llm(checkpoint(), no_such_argument=1)


def test_an_llm_takes_them_and_names_once_what_has_no_effect(start_llm, checkpoint, capsys):
    with start_llm(checkpoint(), trust_remote_code=True, swap_space=4, enforce_eager=False, show_progress=True) as llm:
        [line] = [line for line in capsys.readouterr().err.splitlines() if "without an effect" in line]
        assert line == "arguments without an effect here: trust_remote_code, swap_space"
        assert llm.generate([1, 2], GREEDY)[0].finished


@pytest.mark.parametrize(("quantization", "method"), [("awq", "awq"), ("gptq_marlin", "gptq"), ("fp8", "fp8")])
def test_a_quantization_that_the_checkpoint_does_not_have_is_refused(start_llm, checkpoint, quantization, method):
    with pytest.raises(
        ConfigError, match=f"quantization='{method}', but .* the weights are not quantized: leave it out"
    ):
        start_llm(checkpoint(), quantization=quantization)


@pytest.mark.parametrize("use_tqdm", [True, False, functools.partial(print)])
def test_generate_and_chat_take_vllms_arguments(llm, use_tqdm):
    ids = llm.tokenizer.encode("the cat reads")
    [expected] = llm.generate([ids], GREEDY)
    prompts = [
        {"prompt_token_ids": ids, "multi_modal_data": None, "mm_processor_kwargs": None},
        {"prompt": "the cat reads"},
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=use_tqdm, lora_request=None, tokenization_kwargs={})
    assert [output.outputs[0].token_ids for output in outputs] == [expected.outputs[0].token_ids] * 2
    messages = [{"role": "user", "content": "the cat"}]
    template = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    answers = [
        llm.chat(
            messages,
            GREEDY,
            use_tqdm=use_tqdm,
            chat_template=template,
            chat_template_content_format=content_format,
            mm_processor_kwargs=None,
        )[0].prompt
        for content_format in ("auto", "string", "openai")
    ]
    assert answers == ["the cat"] * 3


def test_a_content_format_is_what_the_template_gets(llm):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    template = "{{ messages[0].content }}"
    chat = functools.partial(llm.chat, sampling_params=GREEDY, chat_template=template)
    assert chat(parts, chat_template_content_format="string")[0].prompt == "a\nb"
    text = [{"role": "user", "content": "a"}]
    assert chat(text, chat_template_content_format="openai")[0].prompt == "[{'type': 'text', 'text': 'a'}]"
    with pytest.raises(RequestError, match="chat_template_content_format='html' must be one of"):
        chat(text, chat_template_content_format="html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_request": object()}, "lora_request must be of type LoRARequest"),
        ({"tokenization_kwargs": {"truncate_prompt_tokens": 5}}, "tokenization_kwargs=.* is not supported"),
    ],
)
def test_what_would_change_a_calls_answer_is_refused_by_its_name(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2], GREEDY, **arguments)
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template="a", **arguments)


@pytest.mark.parametrize("key", ["multi_modal_uuids", "prompt_embeds"])
def test_prompts_of_other_kinds_are_refused_by_their_key(llm, key):
    with pytest.raises(RequestError, match=f"has '{key}', which is not supported"):
        llm.generate({"prompt": "a", key: {"image": 1}}, GREEDY)
