"""Encoders against transformers, in float32: vectors, alone and in batches, from checkpoints as they are published."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from jaxis import LLM
from jaxis.errors import CheckpointError, ConfigError, RequestError
from jaxis.kernels import native
from tests.support.encoder_checkpoints import (
    FAMILIES,
    NTK,
    POOLING,
    SIZES,
    reference,
    save_as_published,
    save_model,
    save_pooling,
    save_tokenizer,
    slowed,
    texts,
    texts_with_padding,
)
from tests.support.quick_rows import quick_rows


def vectors(llm, prompts, **arguments):
    return np.array([output.outputs.embedding for output in llm.embed(prompts, **arguments)], np.float32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Gemma3TextModel"])
def test_vectors_are_the_references(family, tmp_path):
    model = save_model(tmp_path, family)
    save_pooling(tmp_path)
    with LLM(tmp_path, show_progress=False) as llm:
        expected = [reference(model, token_ids, "mean") for token_ids in texts(5)]
        np.testing.assert_allclose(vectors(llm, texts(5)), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "family", quick_rows([name for name in FAMILIES if name != "Gemma3TextModel"], ["XLMRobertaModel"])
)
def test_padding_in_a_prompt_is_counted_as_in_the_reference(family, tmp_path):
    model = save_model(tmp_path, family)
    save_pooling(tmp_path)
    prompts = texts_with_padding(model.config.pad_token_id)
    expected = [reference(model, token_ids, "mean") for token_ids in prompts]
    with LLM(tmp_path, show_progress=False) as llm:
        np.testing.assert_allclose(vectors(llm, prompts), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(vectors(llm, prompts[1])[0], expected[1], rtol=0, atol=1e-5)


def test_nomics_own_config_says_the_same(tmp_path):
    model = save_model(tmp_path, "NomicBertModel")
    save_pooling(tmp_path)
    config = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu"}
    config |= {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 80, "vocab_size": 200}
    config |= {"layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "type_vocab_size": 2}
    config |= {
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
    }
    config |= {"rotary_emb_scale_base": None, "rotary_scaling_factor": None, "use_rms_norm": False}
    config |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False}
    config |= {"pad_vocab_size_multiple": 64, "max_trained_positions": 2048, "dense_seq_output": True}
    config |= {"use_flash_attn": True, "use_xentropy": True, "fused_bias_fc": True, "mlp_fc2_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, show_progress=False) as llm:
        expected = [reference(model, token_ids, "mean") for token_ids in texts(5)]
        np.testing.assert_allclose(vectors(llm, texts(5)), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("theta", "scaling", "num_types"),
    quick_rows(
        [(20_000.0, NTK, 1), (500_000.0, {**NTK, "factor": 2.0}, 0), (10_000.0, None, 2)],
        [(20_000.0, NTK, 1), (10_000.0, None, 2)],
    ),
)
def test_gtes_own_format_says_the_same(theta, scaling, num_types, tmp_path):
    model = save_model(tmp_path, "GteModel", type_vocab_size=num_types)
    save_pooling(tmp_path, "cls")
    save_as_published(tmp_path, ["NewModel", "NewForTokenClassification"], theta, scaling)
    slowed(model, theta, scaling["factor"] if scaling else 1.0)
    with LLM(tmp_path, show_progress=False) as llm:
        expected = [reference(model, token_ids, "cls") for token_ids in texts(5)]
        np.testing.assert_allclose(vectors(llm, texts(5)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {**NTK, "mixed_b": 0.6}}, "mixed_b"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ({"logn_attention_scale": True}, "logn_attention_scale"),
        ({"pack_qkv": False}, "pack_qkv"),
    ],
)
def test_what_gtes_own_format_has_besides_is_named(changes, named, tmp_path):
    save_model(tmp_path, "GteModel")
    save_pooling(tmp_path)
    save_as_published(tmp_path, ["NewModel"], 20_000.0, NTK, **changes)
    with pytest.raises(ConfigError, match=named):
        LLM(tmp_path, show_progress=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", POOLING)
def test_each_mode_with_and_without_a_length_of_one(mode, tmp_path):
    model = save_model(tmp_path)
    save_pooling(tmp_path, mode, normalize=mode == "cls")
    with LLM(tmp_path, show_progress=False) as llm:
        expected = [reference(model, token_ids, mode, normalize=mode == "cls") for token_ids in texts(5)]
        np.testing.assert_allclose(vectors(llm, texts(5)), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    save_model(folder)
    save_pooling(folder, max_seq_length=64)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, show_progress=False) as llm:
        yield llm


@pytest.mark.sampled
@pytest.mark.skipif(not native.usable(), reason="XLA does not promise it")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_vector_does_not_depend_on_other_texts(folder, quantization):
    with LLM(folder, show_progress=False, quantization=quantization, max_num_batched_tokens=256) as llm:
        together = vectors(llm, texts())
        for number in (0, 7, 23, 39):
            np.testing.assert_array_equal(vectors(llm, texts()[number])[0], together[number])
        np.testing.assert_array_equal(vectors(llm, texts()[::-1])[::-1], together)


def test_int8_is_close(folder, llm):
    with LLM(folder, show_progress=False, quantization="int8") as quantized:
        assert np.min(np.sum(vectors(llm, texts()) * vectors(quantized, texts()), axis=1)) > 0.995


def test_text_is_tokenized_with_its_end(llm):
    outputs = llm.embed(["w3 w4", {"prompt_token_ids": [2, 8, 9, 3]}])
    assert [output.prompt_token_ids for output in outputs] == [[2, 8, 9, 3]] * 2
    assert outputs[0].outputs.embedding == outputs[1].outputs.embedding
    assert (outputs[0].prompt, outputs[1].prompt) == ("w3 w4", None)
    [cut] = llm.embed("w1 " * 100, truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == [2, *[6] * 62, 3]
    [cut] = llm.embed("w1 " * 100, truncate_prompt_tokens=4)
    assert cut.prompt_token_ids == [2, 6, 6, 3]


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ("w1 " * 63, {}, "has 65 tokens, more than the 64"),
        (["w1", ""], {}, "text 1 of 2 is empty"),
        ([[]], {}, "is empty"),
        ([[2, 200, 3]], {}, "outside of 0 to 199"),
        ("w1", {"truncate_prompt_tokens": 65}, "more than the 64 tokens"),
        ("w1", {"truncate_prompt_tokens": -2}, "must be a number of tokens"),
        ("w1", {"prompt_name": "query"}, "no prompt for texts of kind 'query'"),
    ],
)
def test_what_cannot_be_honoured_is_one_clear_error(llm, prompts, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.embed(prompts, **arguments)


def test_models_of_one_kind_do_not_do_what_the_other_does(llm):
    with pytest.raises(RequestError, match="makes vectors"):
        llm.generate("w1")
    with LLM(show_progress=False) as generator, pytest.raises(RequestError, match="generates text"):
        generator.embed("a")


def test_a_decoder_makes_vectors_of_its_last_token():
    with LLM(runner="pooling", show_progress=False) as llm, LLM(show_progress=False) as generator:
        ids = generator.tokenizer.encode("The capital of France is Paris.")
        [vector] = vectors(llm, [ids])
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        # The same hidden state gives the model's logits: its direction decides the most likely token.
        embeddings = np.asarray(generator.engine.runner.model.decoder.embed_tokens.decode(vector[None]))
        assert embeddings.argmax() == generator.compute_logits(ids)[-1].argmax()


@pytest.mark.parametrize("tied", quick_rows([True, False], [False]))
def test_a_checkpoint_of_a_decoder_alone(tied, tmp_path):
    """As Qwen3-Embedding is published: its tensors have no prefix, and no head, which config.json may speak of."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**sizes)).eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    save_tokenizer(tmp_path)
    save_pooling(tmp_path, "last")
    with LLM(tmp_path, show_progress=False) as llm:
        expected = [reference(model, token_ids, "last") for token_ids in texts(10)]
        np.testing.assert_allclose(vectors(llm, texts(10)), expected, rtol=0, atol=5e-6)
    with pytest.raises(ConfigError, match="cannot chat"):
        LLM(tmp_path, show_progress=False, needs_chat_template=True)


def test_settings_that_are_not_supported_are_refused(tmp_path):
    save_model(tmp_path)
    save_pooling(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(CheckpointError, match="chooses pooling_mode_max_tokens"):
        LLM(tmp_path, show_progress=False)
    chosen = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(chosen))
    with pytest.raises(ConfigError, match="include_prompt"):
        LLM(tmp_path, show_progress=False)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    )
    with pytest.raises(CheckpointError, match="a module 'Dense'"):
        LLM(tmp_path, show_progress=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "modules.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"position_embedding_type": "relative_key"}))
    with pytest.raises(ConfigError, match="position_embedding_type"):
        LLM(tmp_path, show_progress=False)
