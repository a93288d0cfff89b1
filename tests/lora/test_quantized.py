"""Adapters beside quantized weights: against PEFT's unmerged models of what these weights stand for, in float32."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch

from jaxis import LLM, SamplingParams
from jaxis.kernels.weights import dequantize
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.experts import JaxExperts
from jaxis.lora import LoRARequest
from tests.support.adapters import randomize
from tests.support.parity import FAMILIES, checkpoint_folder, prompt, reference_model
from tests.support.quantized_models import load
from tests.support.quick_rows import quick_rows

ROWS = {family.name: family for family in FAMILIES}
TOKENS = prompt(17)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
NAMES = ("Qwen3", "Gemma 3", "Phi-4", "Qwen3.5", "LFM2")
CASES = [(name, qtype) for name in NAMES for qtype in ("int8", "int4")]


def dequantized(family, rules):
    """transformers' model with the weights that jaxis has in memory, in float32."""
    model, held = copy.deepcopy(reference_model(family)), load(Path(checkpoint_folder(family)), rules)
    tensors = {}
    for name, param in held.named_parameters():
        value = param.get_value()
        value = value if isinstance(value, jax.Array) else dequantize(value)
        tensors[checkpoint_names_of(held).name_in_checkpoint(name)] = torch.tensor(np.asarray(value))
    tensors |= _stacks_of_experts(held)
    before = model.state_dict()
    tensors = {name: tensor.reshape(before[name].shape) for name, tensor in tensors.items() if name in before}
    layers = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    head = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert layers - head <= set(tensors)
    assert any((tensors[name] - before[name]).abs().max() > 1e-3 for name in layers - head)
    model.load_state_dict(tensors, strict=False)
    return model


def _stacks_of_experts(held):
    """The experts' parameters as transformers has them."""
    tensors = {}
    for name, layer in held.named_modules():
        if isinstance(layer, JaxExperts):
            gate, up, down = (
                np.stack(
                    [
                        dequantize(jax.tree.map(lambda array, i=i: array[i], getattr(layer, stack).get_value()))
                        for i in range(layer.num_experts)
                    ]
                )
                for stack in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{name}.gate_up_proj"] = torch.tensor(np.concatenate([gate, up], axis=1))
            tensors[f"{name}.down_proj"] = torch.tensor(down)
    return tensors


def errors(llm, model, adapter):
    """Of log-probabilities, next to the largest logit."""
    [output] = llm.generate([TOKENS], PARAMS, lora_request=adapter, progress=False)
    completion = output.outputs[0]
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS + completion.token_ids])).logits[0].double()
    rows = torch.log_softmax(logits, -1)
    return [
        abs(each.logprob - rows[len(TOKENS) - 1 + i, token].item()) / logits.abs().max().item()
        for i, step in enumerate(completion.logprobs)
        for token, each in step.items()
    ]


@pytest.mark.parametrize(("name", "qtype"), quick_rows(CASES, [("Qwen3", "int4")]))
def test_adapters_compute_what_pefts_do_with_the_dequantized_weights(name, qtype, tmp_path):
    rules = [{"module_path": ".*", "weight_qtype": qtype}]
    base = dequantized(ROWS[name], rules)
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_alpha=8)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.add_adapter("dora", dataclasses.replace(config, use_dora=True))
    for adapter in ("dora", "default"):
        adapted.set_adapter(adapter)
        randomize(adapted)
    adapted.save_pretrained(tmp_path)
    sizes = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 64, "show_progress": False}
    config = {"quantization": {"qwix": {"rules": rules}}}
    with LLM(checkpoint_folder(ROWS[name]), enable_lora=True, additional_config=config, **sizes) as llm:
        assert max(errors(llm, adapted, LoRARequest("a", 1, tmp_path))) < 1e-5
        adapted.set_adapter("dora")
        assert max(errors(llm, adapted, LoRARequest("b", 2, tmp_path / "dora"))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_adapters_of_experts_and_heads_compute_what_pefts_do_with_the_dequantized_weights(qtype, tmp_path):
    name, rules = "Qwen3 MoE", [{"module_path": ".*", "weight_qtype": qtype}]
    targets = {
        "target_modules": ["o_proj", "lm_head"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    adapted = peft.get_peft_model(dequantized(ROWS[name], rules), peft.LoraConfig(**targets, r=4, lora_alpha=8)).eval()
    randomize(adapted)
    adapted.save_pretrained(tmp_path)
    sizes = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 64, "show_progress": False}
    sizes |= {"lora_target_modules": ["all-linear", "experts", "lm_head"], "enable_lora": True}
    with LLM(
        checkpoint_folder(ROWS[name]), additional_config={"quantization": {"qwix": {"rules": rules}}}, **sizes
    ) as llm:
        assert max(errors(llm, adapted, LoRARequest("a", 1, tmp_path))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "qtype"), CASES)
def test_quantized_activations_cost_an_adapter_no_accuracy(name, qtype, tmp_path):
    """Adapters see activations as they are: the error is the base's, of whose inputs 8 bits are kept."""
    base = dequantized(ROWS[name], qtype)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", r=4, lora_alpha=8)).eval()
    randomize(adapted, scale=0.05)
    adapted.save_pretrained(tmp_path)
    sizes = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 64, "show_progress": False}
    with LLM(checkpoint_folder(ROWS[name]), enable_lora=True, quantization=qtype, **sizes) as llm:
        changed = np.mean(errors(llm, adapted, LoRARequest("a", 1, tmp_path)))
        with adapted.disable_adapter():
            unchanged = np.mean(errors(llm, adapted, None))
    print(f"\n| {name} | {qtype} | {unchanged:.1e} | {changed:.1e} |")
    assert changed < 2 * unchanged
