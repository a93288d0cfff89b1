"""Indexers of groups: against transformers' modules, whole sequences and the cache in chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextRotaryEmbedding

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.group_indexer import GatedGroupIndexer, GroupIndexerSizes, MeanGroupIndexer
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.module import named_modules
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from tests.layers.layer_scopes import in_one_program, scope_of

HIDDEN, LATENT, BLOCK_SIZE = 32, 24, 8
# With this many heads no score is 0 in all of them; equal scores may select differently.
SIZES = GroupIndexerSizes(num_heads=18, head_dim=16, group_size=4, num_groups=3)


def randomized(module):
    """The module with weights that are not near their initial values."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(0.5 * torch.randn(param.shape, generator=generator))
    return module


def load(indexer, module, **renames):
    weights = {renames.get(name, name): value.numpy() for name, value in module.state_dict().items()}
    assert JaxAutoWeightsLoader(indexer).load_weights(weights.items()) == weights.keys()
    return indexer


class Glm:
    def __init__(self, max_model_len=64):
        config = Glm5NextTextConfig(
            hidden_size=HIDDEN,
            q_lora_rank=LATENT,
            index_n_heads=SIZES.num_heads,
            index_head_dim=SIZES.head_dim,
            index_topk=SIZES.num_groups * SIZES.group_size,
            index_kpool=SIZES.group_size,
            num_hidden_layers=4,
        )
        self.module = randomized(Glm5NextTextIndexer(config, 3))
        scope = scope_of({"hidden_size": HIDDEN}, max_model_len=max_model_len)
        indexer = GatedGroupIndexer(scope, SIZES, query_size=LATENT)
        self.indexer = load(indexer, self.module, index_kpool_compress_gate="compress_gate.weight")

    def expected(self, x, query_input):
        ones = torch.ones(1, len(x), dtype=torch.bool)
        found = self.module(torch.tensor(x)[None], torch.tensor(query_input)[None], ones, None)[0].numpy()
        return [sorted(row[row >= 0]) for row in found]


class Qwen:
    def __init__(self, max_model_len=64):
        config = Qwen4ExpTextConfig(
            hidden_size=HIDDEN,
            head_dim=32,
            indexer_n_heads=SIZES.num_heads,
            indexer_kv_heads=1,
            indexer_head_dim=SIZES.head_dim,
            indexer_budget=SIZES.num_groups * SIZES.group_size,
            indexer_compress_ratio=SIZES.group_size,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        )
        self.module = randomized(Qwen4ExpTextQSAIndexer(config, 3))
        self.rotary = Qwen4ExpTextRotaryEmbedding(config)
        rope = RotaryEmbedding(tuple(float(x) for x in self.rotary.inv_freq))
        scope = scope_of({"hidden_size": HIDDEN, "rms_norm_eps": config.rms_norm_eps}, max_model_len=max_model_len)
        self.indexer = load(MeanGroupIndexer(scope, SIZES, rope=rope), self.module)

    def expected(self, x, query_input):
        del query_input
        hidden = torch.tensor(x)[None]
        positions = torch.arange(len(x))[None]
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()[None, None]
        with torch.no_grad():
            mask = self.module(hidden, self.rotary(hidden, positions), causal, None)[0, 0]
        return [np.flatnonzero(row).tolist() for row in (mask & causal[0, 0]).numpy()]


def inputs(length):
    rng = np.random.default_rng(0)
    return rng.standard_normal((length, HIDDEN), np.float32), rng.standard_normal((length, LATENT), np.float32)


def paged(indexer, x, query_input, chunks):
    """The selections of a sequence that comes in chunks."""
    specs = [module.kv_cache_spec for _, module in named_modules(indexer) if isinstance(module, HasCache)]
    layouts = [spec.layout(BLOCK_SIZE, np.float32) for spec in specs]
    caches = tuple(layout.cache(jnp.full((9, *layout.shape), jnp.nan)) for layout in layouts)
    graph, state = nnx.split(indexer)
    run = jax.jit(lambda state, *operands: nnx.merge(graph, state)(*operands))
    selections, start = [], 0
    for size in chunks:
        end = start + size
        metadata = AttentionMetadata(
            jnp.arange(start, end),
            jnp.asarray([[5, 2, 7, 1, 3, 8, 4]]),
            jnp.asarray([end]),
            jnp.asarray([0, size]),
            jnp.asarray([int(size == 1), 1, 1]),
        )
        caches, selected = run(state, caches, x[start:end], query_input[start:end], metadata)
        selections += [row[row >= 0].tolist() for row in np.asarray(selected)]
        start = end
    return selections


@pytest.mark.parametrize("family", [Glm, Qwen])
def test_whole_sequences_and_chunks_select_as_transformers_does(family):
    family = family()
    x, query_input = inputs(45)
    expected = family.expected(x, query_input)
    assert min(map(len, expected[15:])) == 12
    assert max(map(len, expected)) == SIZES.num_selected
    metadata = AttentionMetadata.for_whole_sequences([45])
    caches, whole = in_one_program(family.indexer, (), x, query_input, metadata)
    assert caches == ()
    assert [np.flatnonzero(row).tolist() for row in whole] == expected
    assert paged(family.indexer, x, query_input, [45]) == expected
    assert paged(family.indexer, x, query_input, [18, 1, 1, 1, 24]) == expected


@pytest.mark.parametrize("family", [Glm, Qwen])
def test_an_engine_for_contexts_that_are_selected_whole_caches_nothing(family):
    for length, number in ((SIZES.num_selected, 0), (SIZES.num_selected + 1, 2)):
        modules = [module for _, module in named_modules(family(length).indexer)]
        assert sum(isinstance(module, HasCache) for module in modules) == number
