"""`suppress_tokens` and `begin_suppress_tokens` of generation_config.json, against transformers' generate."""

import json

import numpy as np
import pytest
import torch
import transformers

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError, RequestError

NUM_TOKENS = 12
PROMPTS = [np.random.default_rng(seed).integers(0, 40, 4 + seed).tolist() for seed in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, max_position_embeddings=64, eos_token_id=None, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, folder


def generated(model, prompt, **settings):
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, **settings)
    return ids[0, len(prompt) :].tolist()


def start(folder, settings, **arguments):
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return LLM(str(folder), dtype="float32", kv_cache_memory="1MiB", show_progress=False, **arguments)


@pytest.mark.parametrize("keys", [("suppress_tokens",), ("begin_suppress_tokens",), None])
def test_tokens_are_those_of_transformers(reference, keys):
    model, folder = reference
    plain = [generated(model, prompt) for prompt in PROMPTS]
    ids = {
        "suppress_tokens": sorted({each[3] for each in plain}),
        "begin_suppress_tokens": sorted({each[0] for each in plain}),
    }
    settings = {key: ids[key] for key in keys or ids}
    expected = [generated(model, prompt, **settings) for prompt in PROMPTS]
    assert expected != plain
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
    for arguments in ({}, drafting):
        with start(folder, settings, **arguments) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            sampled = SamplingParams(temperature=5.0, max_tokens=NUM_TOKENS, seed=1, ignore_eos=True)
            drawn = [
                each.outputs[0].token_ids for each in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampled)
            ]
            assert not set(settings.get("suppress_tokens", [])) & {token for each in drawn for token in each}
            assert not set(settings.get("begin_suppress_tokens", [])) & {each[0] for each in drawn}


def test_wrong_ids_and_requests_without_another_token_are_named(reference):
    _, folder = reference
    for wrong in ([40], [-1], 3, [True], list(range(40))):
        with pytest.raises(ConfigError, match=r"generation_config\.json has suppress_tokens=.*ids 0 to 39: correct"):
            start(folder, {"suppress_tokens": wrong})
    with start(folder, {"suppress_tokens": [1], "begin_suppress_tokens": [2]}) as llm:
        prompt = {"prompt_token_ids": [5]}
        for allowed in ([1], [2], [1, 2]):
            params = SamplingParams(max_tokens=1, allowed_token_ids=allowed)
            with pytest.raises(RequestError, match=r"allowed_token_ids=.* has only tokens that .* suppresses"):
                llm.generate(prompt, params)
        [output] = llm.generate(prompt, SamplingParams(max_tokens=2, allowed_token_ids=[1, 2, 3], ignore_eos=True))
        assert output.outputs[0].token_ids[0] == 3
