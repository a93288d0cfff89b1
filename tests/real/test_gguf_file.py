"""A real GGUF file: the weights are gguf-py's, and the answers those of transformers on them."""

import gguf
import jax
import numpy as np
import pytest
import torch
import transformers

from jaxis import LLM, SamplingParams
from jaxis.bringup.verify.compare import relative_error
from jaxis.kernels.weights import dequantize
from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from jaxis.loading.gguf_block_types import TYPE_OF_NAME
from jaxis.quantization.formats.gguf import read_blocks

pytestmark = [pytest.mark.real, pytest.mark.production_xla]

MAX_RELATIVE_ERROR = 1e-5  # of logits up to 30
GREEDY_TOKENS = 100
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics state that",
    "日本の首都は",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first human beings",
]


@pytest.fixture(scope="module")
def dequantized(gguf_path):
    """Name in the file -> float32 tensor, by gguf-py."""
    tensors = gguf.GGUFReader(gguf_path).tensors
    return {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}


@pytest.fixture(scope="module")
def reference(dequantized):
    """transformers' model of the dequantized weights; its names and settings are the published checkpoint's."""
    config = transformers.Gemma3TextConfig(
        **{"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
        **{"max_position_embeddings": 32768, "sliding_window": 512, "tie_word_embeddings": True},
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    found = {}
    for name in model.state_dict():
        if name != "lm_head.weight":
            tensor = dequantized[names.get_name(name, try_suffixes=(".weight",))]
            found[name] = torch.from_numpy(tensor - 1 if name.endswith("norm.weight") else tensor)
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


@pytest.fixture(scope="module")
def llm(gguf_path):
    with LLM(str(gguf_path), dtype="float32", max_model_len=512) as model:
        yield model


@pytest.fixture(scope="module")
def outputs(llm):
    """The greedy continuation of each prompt; of all at once, since a step takes as long for ten as for one."""
    return llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True))


def reference_logits(reference, token_ids):
    with torch.no_grad():
        return reference(torch.tensor([token_ids])).logits[0].numpy()


def test_every_tensor_equals_gguf_pys(gguf_path, dequantized):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    with GGUFCheckpoint(gguf_path) as checkpoint:
        assert len(checkpoint.names()) == len(dequantized) == 236
        types = checkpoint.config["quantization_config"]["block_types"]
        for name, tensor in checkpoint.iterate():
            expected = dequantized[names.get_name(name, try_suffixes=(".weight",))]
            if name.endswith("norm.weight"):
                np.testing.assert_array_equal(tensor, expected - 1)
                continue
            weight = read_blocks(TYPE_OF_NAME[types[name.removesuffix(".weight")]], tensor, expected.shape)
            for first in range(0, len(expected), 8192):
                rows = jax.tree.map(lambda array, first=first: array[first : first + 8192], weight)
                np.testing.assert_array_equal(np.asarray(dequantize(rows)), expected[first : first + 8192])


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_and_logits_equal_transformers(llm, outputs, reference, index):
    prompt, generated = outputs[index].prompt_token_ids, list(outputs[index].outputs[0].token_ids)
    assert len(generated) == GREEDY_TOKENS
    tokens = [*prompt, *generated]
    expected = reference_logits(reference, tokens)
    # By induction, what transformers would generate.
    assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == generated
    for path in ("whole", "paged"):
        assert relative_error(llm.compute_logits(tokens, path=path), expected) < MAX_RELATIVE_ERROR


def test_dequantized_weights_give_the_same_logits(gguf_path, reference):
    with LLM(str(gguf_path), dtype="float32", max_model_len=512, quantization="dequantize") as model:
        tokens = model.tokenizer.encode(PROMPTS[0])
        logits = model.compute_logits(tokens)
    assert relative_error(logits, reference_logits(reference, tokens)) < MAX_RELATIVE_ERROR
