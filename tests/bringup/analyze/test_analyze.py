"""What `analyze` says of configs as their makers published them."""

import json

import pytest

from jaxis.bringup.analyze.analysis import analyze
from jaxis.errors import CheckpointError, ConfigError
from tests.support.places import TESTS

CONFIGS = TESTS / "data" / "configs"
# Name -> (parameters, those active for a token, bytes of bfloat16 cache a token). Parameters as published, in billions:
# model cards, technical reports. Active ones are counted without the table of embeddings, as OpenAI does, except where
# the second figure is a pair: then with it, as most do. Cache bytes are 2 (keys, values) x layers x heads x size x 2.
PUBLISHED = {
    "llama-3.1-8b": (8.03, None, 2 * 32 * 8 * 128 * 2),
    "qwen2.5-7b": (7.62, None, 2 * 28 * 4 * 128 * 2),
    "qwen3-8b": (8.19, None, 2 * 36 * 8 * 128 * 2),
    "qwen3-30b-a3b": (30.5, (3.3, "with embeddings"), 2 * 48 * 4 * 128 * 2),
    "mixtral-8x7b": (46.7, (12.9, "with embeddings"), 2 * 32 * 8 * 128 * 2),
    "deepseek-v2-lite": (15.7, (2.4, "without"), 27 * (512 + 64) * 2),
    "deepseek-v2.5": (236, (21, "without"), 60 * 576 * 2),
    "deepseek-v3": (671, (37, "without"), 61 * 576 * 2),
    "deepseek-r1": (671, (37, "without"), 61 * 576 * 2),
    "kimi-k2": (1026, (32, "without"), 61 * 576 * 2),
    "gpt-oss-20b": (20.91, (3.61, "without"), 2 * 24 * 8 * 64 * 2),
    "llama-4-scout": (107.8, (17, "with embeddings"), 2 * 48 * 8 * 128 * 2),
    "glm-4.5": (353, (32, "without"), 2 * 92 * 8 * 128 * 2),
    "gemma-2-9b": (9.24, None, 2 * 42 * 8 * 256 * 2),
    "gemma-3-1b": (1.0, None, 2 * 26 * 1 * 256 * 2),
    # Without encoders of images and audio, which makers count (E2B: 5.1, E4B: 8.0).
    "gemma-4-e2b": (4.63, None, 2 * (12 * 256 + 3 * 512) * 2),
    "gemma-4-e4b": (7.46, None, 2 * 2 * (20 * 256 + 4 * 512) * 2),
    "gemma-4-12b": (11.91, None, 2 * (40 * 8 * 256 + 8 * 512) * 2),
    "gemma-4-26b-a4b": (25.2, (3.8, "without"), 2 * (25 * 8 * 256 + 5 * 2 * 512) * 2),
    "gemma-4-31b": (30.7, None, 2 * (50 * 16 * 256 + 10 * 4 * 512) * 2),
    "phi-4": (14.66, None, 2 * 40 * 10 * 128 * 2),
    "olmo-2-7b": (7.3, None, 2 * 32 * 32 * 128 * 2),
    "olmo-3-7b": (7.3, None, 2 * 32 * 32 * 128 * 2),
    "phi-3-mini-4k": (3.82, None, 2 * 32 * 32 * 96 * 2),
    "phi-4-mini": (3.84, None, 2 * 32 * 8 * 128 * 2),
    "glm-4-9b-0414": (9.4, None, 2 * 40 * 2 * 128 * 2),
    "granite-3.3-8b": (8.17, None, 2 * 40 * 8 * 128 * 2),
    "starcoder2-3b": (3.03, None, 2 * 30 * 2 * 128 * 2),
    "command-r": (35, None, 2 * 40 * 64 * 128 * 2),
    "command-r7b": (8.03, None, 2 * 32 * 8 * 128 * 2),
    "smollm3-3b": (3.08, None, 2 * 36 * 4 * 128 * 2),
    "ernie-4.5-0.3b": (0.36, None, 2 * 18 * 2 * 128 * 2),
    "minimax-m2.5": (229, (10.4, "without"), 2 * 62 * 8 * 128 * 2),
    "minimax-m2.7": (229, (10.4, "without"), 2 * 62 * 8 * 128 * 2),
    "kimi-k2.5": (1026, (32, "without"), 61 * 576 * 2),
    "qwen3-vl-30b-a3b": (30.5, (3.3, "with embeddings"), 2 * 48 * 4 * 128 * 2),
    "qwen3-vl-235b-a22b": (235, (22, "with embeddings"), 2 * 94 * 4 * 128 * 2),
    "k-exaone-236b-a23b": (236, (23, "with embeddings"), 2 * 48 * 8 * 128 * 2),
    "qwen3-next-80b-a3b": (79.674, (3.875, "with embeddings"), 2 * 12 * 2 * 256 * 2),
    "qwen3.5-9b": (8.95, None, 2 * 8 * 4 * 256 * 2),
    "qwen3.6-35b-a3b": (34.7, (3.0, "without"), 2 * 10 * 2 * 256 * 2),
    "lfm2-8b-a1b": (8.34, (1.56, "without"), 2 * 6 * 8 * 64 * 2),
    "lfm2.5-350m": (0.354, None, 2 * 6 * 8 * 64 * 2),
    "granite-4.0-h-350m": (0.340, None, 2 * 4 * 4 * 64 * 2),
    "falcon-h1-0.5b": (0.521, None, 2 * 36 * 2 * 64 * 2),
    "nemotron-h-56b": (56.3, None, 2 * 10 * 8 * 128 * 2),
    "olmoe-1b-7b": (6.92, (1.28, "with embeddings"), 2 * 16 * 16 * 128 * 2),
    "qwen1.5-moe-a2.7b": (14.3, (2.7, "with embeddings"), 2 * 24 * 16 * 128 * 2),
    "qwen2-57b-a14b": (57.4, (14.2, "with embeddings"), 2 * 28 * 4 * 128 * 2),
    "dots.llm1": (142.8, (14, "with embeddings"), 2 * 62 * 32 * 128 * 2),
    "ernie-4.5-21b-a3b": (21.83, (3.35, "without"), 2 * 28 * 4 * 128 * 2),
    "ernie-4.5-300b-a47b": (299.5, (47, "with embeddings"), 2 * 54 * 8 * 128 * 2),
    "granite-3.1-3b-a800m": (3.30, (0.88, "without"), 2 * 32 * 8 * 64 * 2),
    "granite-3.1-1b-a400m": (1.33, (0.43, "without"), 2 * 24 * 8 * 64 * 2),
    "phi-3.5-moe": (41.9, (6.6, "with embeddings"), 2 * 32 * 8 * 128 * 2),
    "hy3-preview": (295, (21, "with embeddings"), 2 * 80 * 8 * 128 * 2),
    "trinity-mini": (26.1, (3.1, "without"), 2 * 32 * 4 * 128 * 2),
    "laguna-xs.2": (33.4, (3.0, "with embeddings"), 2 * 40 * 8 * 128 * 2),
    "mellum2-12b-a2.5b": (12.1, (2.5, "with embeddings"), 2 * 28 * 4 * 128 * 2),
    "hunyuan-a13b": (80.4, (13, "with embeddings"), 2 * 32 * 8 * 128 * 2),
}
# Where layers may have two caches, of attention and of a state, or none.
CACHES_OF_HYBRIDS = {"falcon-h1-0.5b": 2 * 36, "nemotron-h-56b": 54 + 10}
# Name -> what it must say is missing, and in which file that belongs.
UNSUPPORTED = {
    "deepseek-v3.2": {"sparse indexer: a token attends to its best 2048": "kernels/latent_attention"},
}


def read(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def analyzed(folder, values, **arguments):
    (folder / "config.json").write_text(json.dumps(values))
    return analyze(folder / "config.json", **arguments)


def statuses(analysis):
    return {key.key: key.status for key in analysis.keys}


def test_every_config_here_is_expected_to_be_something():
    assert {path.stem for path in CONFIGS.iterdir()} == set(PUBLISHED) | set(UNSUPPORTED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_can_run_and_has_the_size_that_its_makers_say(name):
    analysis = analyze(CONFIGS / f"{name}.json")
    assert analysis.problems == ()
    assert set(statuses(analysis).values()) <= {"supported", "default", "neutral"}
    total, active, cache_bytes = PUBLISHED[name]
    counts = analysis.parameters
    assert counts.total / 1e9 == pytest.approx(total, rel=0.006)
    if active is None:
        assert counts.experts == 0
    else:
        figure, convention = active
        ours = counts.active + (counts.embedding if convention == "with embeddings" else 0)
        assert ours / 1e9 == pytest.approx(figure, rel=0.03)
    assert sum(kind.bytes_per_token for kind in analysis.kv_cache if kind.kind != "state") == cache_bytes
    config = config_of_text(name)
    layers_with_cache = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    layers_with_cache = CACHES_OF_HYBRIDS.get(name, layers_with_cache)
    assert sum(kind.layers for kind in analysis.kv_cache) == layers_with_cache


def config_of_text(name):
    values = read(name)
    return values.get("text_config", values)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_model_is_told_what_is_missing_and_where_it_belongs(name):
    analysis = analyze(CONFIGS / f"{name}.json")
    assert not analysis.can_run
    assert any("no family of this architecture" in problem for problem in analysis.problems)
    for feature, file in UNSUPPORTED[name].items():
        [problem] = [problem for problem in analysis.problems if feature in problem]
        assert file in problem
    assert "unsupported" in statuses(analysis).values()
    assert analysis.parameters is None


def test_what_is_there_is_not_called_missing():
    analysis = analyze(CONFIGS / "deepseek-v3.2.json")
    missing = [problem for problem in analysis.problems if problem.startswith("missing")]
    assert len(missing) == 1, "latents, routing, rope and fp8 are what DeepSeek V3 has"
    keys = statuses(analysis)
    assert {keys[key] for key in ("index_topk", "index_head_dim", "index_n_heads")} == {"unsupported"}
    assert keys["kv_lora_rank"] == keys["scoring_func"] == keys["rope_scaling"] == "supported"
    assert "unknown" not in keys.values()


def test_an_architecture_nobody_registered_whose_parts_are_all_there(tmp_path):
    analysis = analyzed(tmp_path, read("llama-3.1-8b") | {"architectures": ["NewForCausalLM"], "model_type": "new"})
    assert analysis.problems == (
        "no family of this architecture: belongs in models/, models/registry.py; all that its config asks for is there",
    )


def test_layer_kinds_are_told_apart():
    analysis = analyze(CONFIGS / "gpt-oss-20b.json")
    kinds = {kind.kind: (kind.layers, kind.max_tokens, kind.bytes_per_token) for kind in analysis.kv_cache}
    each = 2 * 8 * 64 * 2
    assert kinds == {"window": (12, 128, 12 * each), "full": (12, None, 12 * each)}


def test_active_parameters_are_without_the_embeddings_of_layers():
    """2.3 and 4.6 of "effective" parameters, as Gemma's makers call them."""
    for name, expected in (("gemma-4-e2b", 2.28), ("gemma-4-e4b", 4.64)):
        assert analyze(CONFIGS / f"{name}.json").parameters.active / 1e9 == pytest.approx(expected, rel=0.006)


def test_layers_that_share_a_cache_are_told():
    axes = {axis.name: [f.value for f in axis.features] for axis in analyze(CONFIGS / "gemma-4-e2b.json").axes}
    assert axes["layer kinds"] == [
        "12 x window of 512",
        "3 x full",
        "20 x another layer's keys and values",
        "embeddings of each layer's own, 256 a token",
    ]
    assert "heads of 512 in full layers" in axes["attention"]


def test_axes_tell_what_the_constructed_model_has():
    scout = analyze(CONFIGS / "llama-4-scout.json")
    axes = {axis.name: [feature.value for feature in axis.features] for axis in scout.axes}
    assert sorted(axes["layer kinds"]) == ["12 x full", "36 x chunks of 8192"]
    assert axes["rope"] == ["llama3, theta 500000, factor 16", "none in 12 layers"]
    assert axes["embeddings and head"] == ["a head of its own"]


def test_a_key_nobody_knows_fails(tmp_path):
    analysis = analyzed(tmp_path, read("qwen3-8b") | {"brand_new_switch": True})
    assert analysis.problems == ("config.json has keys that nothing here knows: brand_new_switch",)
    assert statuses(analysis)["brand_new_switch"] == "unknown"
    assert analysis.parameters is not None, "the rest is told all the same"


def test_a_key_that_another_family_has_fails_by_its_axis(tmp_path):
    analysis = analyzed(tmp_path, read("deepseek-v3") | {"index_topk": 2048})
    assert statuses(analysis)["index_topk"] == "unsupported"
    [problem] = analysis.problems
    assert "sparse indexer" in problem
    assert "layers/mla.py" in problem


def test_every_refused_value_is_told_not_only_the_first(tmp_path):
    values = read("llama-3.1-8b") | {"hidden_act": "mish", "rope_scaling": {"rope_type": "spiral"}}
    analysis = analyzed(tmp_path, values)
    assert any("hidden_act='mish'" in problem for problem in analysis.problems)
    assert any("'spiral'" in problem for problem in analysis.problems)
    keys = statuses(analysis)
    assert keys["hidden_act"] == keys["rope_scaling.rope_type"] == "unsupported"
    assert keys["hidden_size"] == "supported"


def test_statuses_tell_what_is_used_from_what_is_assumed_anyway(tmp_path):
    values = read("qwen3-8b") | {"attention_bias": False, "rope_theta": 1e6, "sliding_window": None}
    keys = statuses(analyzed(tmp_path, values))
    assert keys["rope_theta"] == keys["hidden_size"] == "supported"
    assert keys["attention_bias"] == keys["sliding_window"] == "default"
    assert keys["initializer_range"] == keys["transformers_version"] == "neutral"
    assert statuses(analyzed(tmp_path, values | {"attention_bias": True}))["attention_bias"] == "supported"


def test_an_unsupported_checkpoint_format_leaves_the_rest_told(tmp_path):
    values = read("llama-3.1-8b") | {"quantization_config": {"quant_method": "aqlm", "nbits": 2}}
    analysis = analyzed(tmp_path, values)
    [problem] = analysis.problems
    assert "AQLM" in problem
    keys = statuses(analysis)
    assert {keys["quantization_config.quant_method"], keys["quantization_config.nbits"]} == {"unsupported"}
    assert analysis.parameters.total == analyze(CONFIGS / "llama-3.1-8b.json").parameters.total


@pytest.mark.parametrize("given", ["folder", "config.json"])
def test_a_quantization_described_beside_config_json_is_told(tmp_path, given):
    (tmp_path / "config.json").write_text(json.dumps(read("llama-3.1-8b")))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NONE_THAT_IS_KNOWN"}}')
    analysis = analyze(tmp_path if given == "folder" else tmp_path / "config.json")
    assert not analysis.can_run
    assert statuses(analysis)["quantization_config.quant_algo"] == "unsupported"


def test_a_model_type_that_contradicts_the_architecture_is_a_reason(tmp_path):
    analysis = analyzed(tmp_path, read("llama-3.1-8b") | {"model_type": "mistral"})
    assert not analysis.can_run
    assert any("'LlamaForCausalLM'" in problem and "'mistral'" in problem for problem in analysis.problems)


def test_a_required_key_that_is_missing_is_a_reason(tmp_path):
    values = read("qwen3-8b")
    del values["num_attention_heads"]
    analysis = analyzed(tmp_path, values)
    assert not analysis.can_run
    assert any("has no 'num_attention_heads'" in problem for problem in analysis.problems)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "there is no"),
        (lambda folder: folder, "has no config.json"),
        (lambda folder: (folder / "model.gguf", (folder / "model.gguf").touch())[0], "is not a GGUF file"),
        (lambda folder: (folder / "model.txt", (folder / "model.txt").touch())[0], "is not a config.json"),
    ],
)
def test_what_is_no_model_is_one_error(tmp_path, make, message):
    with pytest.raises(CheckpointError, match=message):
        analyze(make(tmp_path))


def test_a_memory_that_is_no_size_is_an_error():
    with pytest.raises(ConfigError, match="lots"):
        analyze(CONFIGS / "qwen3-8b.json", memory="lots")
