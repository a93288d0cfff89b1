"""Adapters by request over families: what PEFT's unmerged model computes, or a refusal that names the module."""

from __future__ import annotations

import copy

import numpy as np
import peft
import pytest
import torch

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError
from jaxis.lora import LoRARequest
from tests.support.adapters import randomize
from tests.support.parity import FAMILIES, Family, checkpoint_folder, prompt, reference_model
from tests.support.quick_rows import quick_rows

QUICK = ("Qwen3", "Gemma 3")
NAMES = (
    *QUICK,
    *("Llama 2", "Llama 3", "Llama 3.1", "Llama, biases", "Llama, head_dim, one kv head", "Llama, linear rope"),
    *("Llama, dynamic rope", "Llama, yarn rope", "Qwen3, tied", "Qwen3, biases, yarn rope", "Mistral, window"),
    *("Mistral", "Mistral 4", "OLMo 2", "OLMo 3, yarn on full layers", "Gemma 2", "Gemma 3n"),
    *("Gemma 4, shared keys and values, embeddings of layers", "Gemma 4, experts, values that are keys"),
    *("Phi-3, longrope", "Phi-4-mini, partial longrope, tied", "Phi-4", "GLM-4-0414", "Granite"),
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
ROWS = {family.name: family for family in FAMILIES}


def saved(family: Family, targets, folder):
    """PEFT's model with random adapters on these modules, which are saved."""
    model = peft.get_peft_model(
        copy.deepcopy(reference_model(family)), peft.LoraConfig(target_modules=targets, r=4, lora_alpha=8)
    )
    randomize(model)
    model.save_pretrained(folder)
    return model.eval()


def linears(family: Family):
    """Ends of the names of the modules that are linear layers in transformers, without the head."""
    model = reference_model(family)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = {name.rpartition(".")[2] for name in names if model.get_submodule(name) is not model.lm_head}
    return sorted(end for end in ends if not end.isdecimal())


def kinds(family: Family):
    """All of them, and each alone; PEFT takes the two that transformers fuses together only."""
    pair, every = ["gate_proj", "up_proj"], linears(family)
    rest = every if set(every).isdisjoint(pair) else [each for each in every if each not in pair]
    return [every, *([pair] if set(pair) <= set(every) else []), *([each] for each in rest)]


@pytest.mark.parametrize("name", quick_rows(NAMES, QUICK))
def test_an_adapter_by_request_is_pefts_or_refused_by_name(name, tmp_path):
    family, tokens = ROWS[name], prompt(17)
    with LLM(
        checkpoint_folder(family),
        enable_lora=True,
        dtype="float32",
        kv_cache_memory="8MiB",
        max_model_len=64,
        show_progress=False,
    ) as llm:
        compared, refused = [], []
        for kind in kinds(family):
            if compared and compared[0] == linears(family):
                break  # all of them at once
            folder = tmp_path / "-".join(kind)[:100]
            model = saved(family, kind, folder)
            request = LoRARequest("a", 1, folder)
            try:
                [output] = llm.generate([{"prompt_token_ids": tokens}], GREEDY, lora_request=request, progress=False)
            except ConfigError as error:
                refused.append((kind, str(error).partition(str(folder))[2]))
                continue
            compared.append(kind)
            _compare(model, tokens, output.outputs[0])
    assert compared, refused
    for kind, message in refused:
        assert any(each in message for each in kind), message


def _compare(model, tokens, completion):
    with torch.no_grad():
        logits = model(torch.tensor([tokens + completion.token_ids])).logits[0].double().numpy()
    rows = logits - logits.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    for i, step in enumerate(completion.logprobs):
        row = rows[len(tokens) - 1 + i]
        assert max(abs(each.logprob - row[token]) for token, each in step.items()) < 1e-4 * np.abs(logits).max()
