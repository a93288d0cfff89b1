"""Families whose tokens attend to those that an indexer selects: published configs, which layers have one, refusals."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.bringup.verify.compare import relative_error
from jaxis.compilation.targets import parse_target
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.mla import LatentCacheSpec
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.planning.plan import Planner, Wanted
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.places import TESTS
from tests.support.plan_sources import published as plan_source

CONFIGS = TESTS / "data" / "configs"


def published(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


# GLM-5: keys and values of github.com's omniinfer, a page on its quantization, with the names of the original.
# GLM-5.3: of a test of a GLM runtime, transcribed from huggingface.co/HawkBearPig/GLM-5.3-Int4-Int8Mix-RTN-g64.
V32, GLM_5, GLM_53 = published("deepseek-v3.2"), published("glm-5"), published("glm-5.3")


def construct(config, **changes):
    # What reads the quantization is not the model.
    config = HFConfig({**config, **changes, "quantization_config": None})
    return construct_abstractly(VllmConfig(ModelConfig("published", config, max_model_len=4096)))


def layers_with_indexers(config, **changes):
    return [i for i, layer in enumerate(construct(config, **changes).model.layers) if layer.self_attn.indexer]


def test_a_token_takes_a_latent_and_an_index_key_where_a_layer_has_an_indexer():
    model = construct(
        GLM_53, num_hidden_layers=4, indexer_types=["full", "full", "full", "shared"], mlp_layer_types=None
    )
    assert model.decoder.cache_entries == ((0, 1, 7), (2, 3, 7), (4, 5, 7), (6, 7))
    attention = model.model.layers[0].self_attn
    specs = (attention.kv_cache_spec, attention.indexer.key_cache.kv_cache_spec)
    assert [spec.layout(16, jnp.bfloat16).block_bytes for spec in specs] == [2 * 16 * 576, 2 * 16 * 128]
    assert construct(V32, num_hidden_layers=2).decoder.cache_entries == ((0, 1), (2, 3))


@pytest.mark.slow
def test_an_engine_for_contexts_that_are_selected_whole_has_dense_attention_and_no_index_keys():
    family = next(f for f in parity.FAMILIES if f.name == "GLM-5.2")
    family = dataclasses.replace(family, config=family.config | {"index_topk": 40})
    folder = parity.checkpoint_folder(family)
    config = ModelConfig(folder, HFConfig.from_folder(folder), dtype=jnp.float32, max_model_len=40)
    model = load_model(VllmConfig(config), make_mesh())
    assert model.decoder.cache_entries == ((0, 3), (1, 3), (2, 3))
    assert model.model.layers[0].self_attn.kv_cache_spec == LatentCacheSpec(32, 16)
    paged, sequence, tokens = PagedSequences(model), PagedSequence(), parity.prompt(17)
    logits = [paged.step([(sequence, part)], pad_tokens=16, pad_requests=2)[0] for part in (tokens[:16], tokens[16:])]
    assert relative_error(np.concatenate(logits), parity.reference_run(family, 17)[0]) < 1e-5
    # Whole sequences are not of the engine, and may be longer.
    whole, expected = parity.run_model(model, (150,))[150][0], parity.reference_run(family, 150)[0]
    assert relative_error(whole, expected) < 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, range(8)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 3}, [0, 1, 4, 7]),
        ({"index_topk_pattern": "FFSSFSSS", "index_topk_freq": 2}, [0, 1, 4]),
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_pattern": "FFFFFFFF"}, [0]),
    ],
    ids=str,
)
def test_which_layers_have_an_indexer(keys, expected):
    assert layers_with_indexers(GLM_5, num_hidden_layers=8, **keys) == list(expected)


@pytest.mark.slow
def test_the_schedule_of_glm_5_3_is_the_list_it_is_published_with():
    config = {key: value for key, value in GLM_53.items() if key != "indexer_types"}
    assert layers_with_indexers(config) == layers_with_indexers(GLM_53) == [0, 1, *range(2, 78, 4)]


def test_indexers_turn_halves_or_neighbours():
    for config, changes, expected in (
        (V32, {}, False),
        (GLM_5, {}, True),
        (GLM_5, {"indexer_rope_interleave": False}, False),
    ):
        attention = construct(config, num_hidden_layers=1, **changes).model.layers[0].self_attn
        assert attention.indexer.rope.interleaved is expected
        assert attention.rope.interleaved


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (V32, {"q_lora_rank": None}, "q_lora_rank"),
        (V32, {"index_head_dim": 32}, "index_head_dim=32"),
        (V32, {"index_topk_freq": 4}, "index_topk_freq"),
        (V32, {"layer_types": ["full_attention"]}, "layer_types"),
        (GLM_5, {"rope_interleave": False}, "rope_interleave"),
        (GLM_5, {"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
        (GLM_5, {"indexer_types": ["shared"]}, "indexer_types"),
        (GLM_5, {"indexer_types": ["full", "full"]}, "indexer_types"),
        (GLM_5, {"index_topk_pattern": "X"}, "index_topk_pattern"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(config, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        construct(config, num_hidden_layers=1, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_plan_counts_index_keys_and_reads_selected_latents_only():
    part = Planner(plan_source("glm-5.3"), Wanted()).device_model(parse_target("h100x8"))
    latents, keys = 78 * 576 * 2, 21 * 128 * 2
    assert sum(part.bytes_per_block.values()) == part.block_size * (latents + keys)
    assert part.decode(4, 100_000).context_bytes == 4 * (2048 * latents + 100_000 * keys)
    assert part.decode(4, 1000).context_bytes == 4 * 1000 * (latents + keys)
