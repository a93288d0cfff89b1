"""`suppress_tokens`, `begin_suppress_tokens` and `bad_words_ids` of generation_config.json, against transformers."""

import json

import numpy as np
import pytest
import torch
import transformers

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError, RequestError
from tests.support.quick_rows import quick_rows

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


@pytest.mark.parametrize("keys", quick_rows([["suppress_tokens"], ["begin_suppress_tokens"], None], [None]))
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


def test_sequences_are_not_completed_as_in_transformers(reference):
    """Also not one that begins in the prompt, and one whose end another one forbids to reach."""
    model, folder = reference
    plain = [generated(model, prompt) for prompt in PROMPTS]
    words = [[prompt[-2], prompt[-1], out[0]] for prompt, out in zip(PROMPTS[:2], plain, strict=False)]
    words += [out[2:4] for out in plain[2:4]] + [out[1:5] for out in plain[4:6]] + [[plain[6][5]], [plain[7][0], 39]]
    # A sequence is not forbidden by its end, and an end-of-sequence token not at all.
    end = plain[7][6]
    settings = {"bad_words_ids": [*words, [end], [end, end]], "eos_token_id": end}
    expected = [generated(model, prompt, **settings) for prompt in PROMPTS]
    assert sum(each != without for each, without in zip(expected, plain, strict=True)) >= 6
    assert any(each[-1] == end for each in expected)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
    for arguments in ({}, drafting):
        with start(folder, settings, **arguments) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            sampled = SamplingParams(temperature=5.0, max_tokens=40, seed=1, ignore_eos=True)
            for prompt, output in zip(
                PROMPTS, llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampled), strict=True
            ):
                ids = prompt + output.outputs[0].token_ids
                for word in words:
                    places = range(len(prompt) - len(word) + 1, len(ids) - len(word) + 1)
                    assert all(ids[at : at + len(word)] != word for at in places), word


def test_wrong_ids_and_requests_without_another_token_are_named(reference):
    _, folder = reference
    for wrong in ([40], [-1], 3, [True], list(range(40))):
        with pytest.raises(ConfigError, match=r"generation_config\.json has suppress_tokens=.*ids 0 to 39: correct"):
            start(folder, {"suppress_tokens": wrong})
    for wrong in ([[40]], [[]], [3], 3, [[True]]):
        with pytest.raises(
            ConfigError, match=r"has bad_words_ids=.*, expected lists of some of the token ids 0 to 39: c"
        ):
            start(folder, {"bad_words_ids": wrong})
    with start(folder, {"suppress_tokens": [1], "begin_suppress_tokens": [2]}) as llm:
        prompt = {"prompt_token_ids": [5]}
        for allowed in ([1], [2], [1, 2]):
            params = SamplingParams(max_tokens=1, allowed_token_ids=allowed)
            with pytest.raises(RequestError, match=r"allowed_token_ids=.* has only tokens that .* suppresses"):
                llm.generate(prompt, params)
        [output] = llm.generate(prompt, SamplingParams(max_tokens=2, allowed_token_ids=[1, 2, 3], ignore_eos=True))
        assert output.outputs[0].token_ids[0] == 3
