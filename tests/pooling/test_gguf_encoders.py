"""Encoders in GGUF: the vectors are those of the checkpoints that the files were made of."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from jaxis import LLM
from jaxis.errors import CheckpointError, ConfigError
from jaxis.tokenizer.checkpoint_tokenizer import read_checkpoint_tokenizer
from tests.pooling.gguf_encoders import ARCHITECTURES, write_encoder
from tests.pooling.test_dense import save_dense
from tests.support.encoder_checkpoints import SIZES, save_model, save_pooling, texts, wordpiece
from tests.support.gguf_models import write_gguf
from tests.support.gguf_tokenizers import xlm_roberta


def vectors(llm, prompts):
    return np.array([output.outputs.embedding for output in llm.embed(prompts)], np.float32)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "mode", "pooling_type"),
    [(family, "mean", 1) for family in ARCHITECTURES] + [("BertModel", "cls", 2)],
)
def test_vectors_are_those_of_the_original_checkpoint(family, mode, pooling_type, tmp_path):
    is_gemma = family == "Gemma3TextModel"
    # A file does not say the scale, which published models have from the heads' size.
    save_model(tmp_path, family, **({"query_pre_attn_scalar": 16} if is_gemma else {}))
    save_pooling(tmp_path, mode, num_dense=2 if is_gemma else 0)
    if is_gemma:
        save_dense(tmp_path, (64, 96, 64))
    write_encoder(tmp_path, path := tmp_path / "model.gguf", pooling_type=pooling_type)
    with LLM(tmp_path, show_progress=False) as llm:
        expected = vectors(llm, texts(6))
        tokens = None if is_gemma else llm.embed("w3 [MASK] w4 unknown")[0].prompt_token_ids
    with LLM(path, show_progress=False, dtype="float32") as llm:
        np.testing.assert_allclose(vectors(llm, texts(6)), expected, rtol=0, atol=1e-6)
        if tokens is not None:
            assert llm.embed("w3 [MASK] w4 unknown")[0].prompt_token_ids == tokens


def test_an_encoder_with_xlm_robertas_tokenizer_makes_the_same_vectors(tmp_path):
    reference, keys = xlm_roberta(tmp_path)
    save_model(tmp_path, "XLMRobertaModel", vocab_size=len(reference))
    reference.save_pretrained(tmp_path)
    save_pooling(tmp_path, "mean")
    write_encoder(tmp_path, path := tmp_path / "model.gguf", tokenizer=keys)
    prompts = ["  東京都に住んでいます \uff21\uff22", "работать 안녕하세요 नमस्ते ½ ☃☃", "quick-brown fox\n"]
    with LLM(tmp_path, show_progress=False) as llm:
        expected = llm.embed(prompts)
    with LLM(path, show_progress=False, dtype="float32") as llm:
        found = llm.embed(prompts)
    for ours, theirs, prompt in zip(found, expected, prompts, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids == reference.encode(prompt)
        np.testing.assert_allclose(ours.outputs.embedding, theirs.outputs.embedding, rtol=0, atol=1e-6)


def test_a_decoders_file_says_that_it_makes_vectors_of_last_tokens(tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(tmp_path)
    save_pooling(tmp_path, "last")
    write_gguf(tmp_path, path := tmp_path / "model.gguf", keys={"pooling_type": 3})
    with LLM(tmp_path, show_progress=False, dtype="float32") as llm:
        expected = vectors(llm, texts(6))
    with LLM(path, show_progress=False, dtype="float32") as llm:
        np.testing.assert_allclose(vectors(llm, texts(6)), expected, rtol=0, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "least"), [("BertModel", 0.999), ("Gemma3TextModel", 0.99)])
def test_quantized_weights_are_close(family, least, tmp_path):
    is_gemma = family == "Gemma3TextModel"
    save_model(tmp_path, family, **({"query_pre_attn_scalar": 16} if is_gemma else {}))
    save_pooling(tmp_path, num_dense=2 if is_gemma else 0)
    if is_gemma:
        save_dense(tmp_path, (64, 96, 64))
    write_encoder(tmp_path, path := tmp_path / "model.gguf", quantize=_as_q8)
    with LLM(tmp_path, show_progress=False) as llm, LLM(path, show_progress=False, dtype="float32") as quantized:
        assert np.min(np.sum(vectors(llm, texts(6)) * vectors(quantized, texts(6)), axis=1)) > least


def _as_q8(name, tensor):
    if name in ("position_embd.weight", "token_types.weight"):
        return None
    return gguf.quants.quantize(tensor, kind := gguf.GGMLQuantizationType.Q8_0), kind


def test_words_are_split_as_the_original_tokenizer_splits_them(tmp_path):

    save_model(tmp_path)
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[unused0]",
        "un",
        "##believ",
        "##able",
        "a",
        "##a",
        "!",
    ]
    backend = wordpiece(vocabulary)
    backend.save(str(tmp_path / "tokenizer.json"))
    write_encoder(tmp_path, path := tmp_path / "model.gguf")
    read = read_checkpoint_tokenizer(path)
    assert read is not None
    original = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("Unbelievable! a", "AA ä b", "[MASK] un"):
        assert read[0].encode(text).ids == original.encode(text).ids
    assert read[0].encode("a", "un").type_ids == original.encode("a", "un").type_ids


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pooling_type": 4}, "bert.pooling_type = 4"),
        ({"attention.causal": True}, "bert.attention.causal = True"),
        ({"expert_count": 8}, "bert.expert_count"),
    ],
)
def test_what_is_not_supported_is_refused(keys, message, tmp_path):
    save_model(tmp_path)
    write_encoder(tmp_path, path := tmp_path / "model.gguf", keys=keys)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(path, show_progress=False)


def test_experts_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "nomic-bert-moe")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'nomic-bert-moe'"):
        LLM(path, show_progress=False)
