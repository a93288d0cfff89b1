"""Analyses of configs as their makers published them."""

import dataclasses
import functools
import itertools
import json

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, DiffLlamaConfig, GPTNeoXJapaneseConfig

from jaxis.bringup.analyze.analysis import analyze
from jaxis.bringup.analyze.text import analysis_text
from jaxis.config.hf_config import KeyUse
from jaxis.config.usual_keys import with_defaults
from jaxis.errors import CheckpointError, ConfigError
from tests.support.published_models import FOLDER as CONFIGS
from tests.support.published_models import LACKING, PUBLISHED, UNKNOWN, read, unsupported
from tests.support.quick_rows import quick_rows

# One of each kind of layer, cache and count; none of the deepest.
QUICK = (
    *("deepseek-v2-lite", "falcon-h1-0.5b", "gemma-4-e2b", "gpt-oss-20b"),
    *("kimi-linear-48b-a3b", "lfm2-8b-a1b"),
)
# Where layers may have two caches, of attention and of a state or an indexer, or none.
CACHES_OF_HYBRIDS = {
    **{"falcon-h1-0.5b": 2 * 36, "nemotron-3-nano-30b-a3b": 23 + 6, "nemotron-h-56b": 54 + 10},
    **{"deepseek-v3.2": 2 * 61, "glm-5": 2 * 78, "glm-5.3": 78 + 21, "deepseek-v4-flash": 43 + 4 * 21 + 2 * 20},
    "deepseek-v4.1-flash": 40 + 3 * 3 + 2 + 2,  # the last two of n-grams
}


@functools.cache
def published_analysis(name):
    """The analysis of a published config, kept: it takes seconds, and several tests ask for some."""
    return analyze(CONFIGS / f"{name}.json")


def analyzed(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return analyze(folder / "config.json")


def of_two_layers(name):
    """A published config whose model is constructed in a moment, where its size does not matter."""
    return read(name) | {"num_hidden_layers": 2}


def statuses(analysis):
    return {key.key: key.use for key in analysis.keys}


@pytest.mark.slow
def test_the_types_of_blocks_of_a_gguf_file_are_one_line():
    key = "quantization_config.block_types.model.layers.{}.mlp.up_proj"
    types = [KeyUse(key.format(i), "Q8_0" if i == 3 else "Q4_1", "used") for i in range(20)]
    analysis = dataclasses.replace(published_analysis("qwen3-0.6b"), keys=(*types, KeyUse("a", 1, "used")))
    text = " ".join(analysis_text(analysis, Console(width=200)).split())
    assert "21 used quantization_config.block_types: 19 x Q4_1, 1 x Q8_0, a=1 Weights" in text


def test_every_config_here_is_expected_to_be_something():
    assert {path.stem for path in CONFIGS.iterdir()} == set(PUBLISHED)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", quick_rows(PUBLISHED, QUICK))
def test_a_published_model_can_run_and_has_the_size_that_its_makers_say(name):
    analysis = published_analysis(name)
    assert analysis.findings == ()
    assert set(statuses(analysis).values()) <= {"used", "default", "neutral", "ignored"}
    published = PUBLISHED[name]
    counts = analysis.sizes.parameters
    if published.is_cut:
        assert counts.total // 10**9 == published.parameters
    else:
        assert counts.total / 1e9 == pytest.approx(published.parameters, rel=0.006)
    if published.active is None:
        assert counts.experts == 0
    elif published.active[1] != UNKNOWN:
        figure, convention = published.active
        tables = {"with embeddings": 1, "without": 0, "without head": -1}[convention]
        ours = counts.active + tables * counts.embedding
        assert ours / 1e9 == pytest.approx(figure, rel=0.03)
    assert (
        sum(kind.bytes_per_token for kind in analysis.sizes.kv_cache if kind.kind != "state") == published.cache_bytes
    )
    config = config_of_text(name)
    layers_with_cache = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    layers_with_cache = CACHES_OF_HYBRIDS.get(name, layers_with_cache)
    assert sum(kind.layers for kind in analysis.sizes.kv_cache) == layers_with_cache


def config_of_text(name):
    values = read(name)
    return with_defaults(values.get("text_config", values))


def test_a_model_of_no_family_is_compared_with_the_closest_one(tmp_path):
    analysis = analyzed(tmp_path, unsupported())
    like, lacking = "deepseek_v32", LACKING.keys()
    assert not analysis.can_run
    assert analysis.closest_families[0] == like
    unknown = {*itertools.chain(*(each.names for each in analysis.findings if each.code == "unknown_key"))}
    assert unknown >= {*lacking}
    assert {each.like for each in analysis.findings if each.code != "no_family"} == {like}
    keys = statuses(analysis)
    assert {keys[key] for key in lacking} == {"unread"}
    assert keys["index_topk"] == keys["index_head_dim"] == "used", "the indexer is DeepSeek V3.2's"
    assert analysis.sizes is None
    assert analysis.modules is None


def test_an_unregistered_architecture_whose_parts_are_all_there(tmp_path):
    analysis = analyzed(
        tmp_path, of_two_layers("llama-3.1-8b") | {"architectures": ["NewForCausalLM"], "model_type": "new"}
    )
    [finding] = analysis.findings
    assert (finding.code, finding.names) == ("no_family", ("NewForCausalLM",))
    assert analysis.closest_families[0] == "llama"


@pytest.mark.parametrize(
    ("config_class", "like", "unknown", "missing"),
    [
        (DiffLlamaConfig, "llama", {f"lambda_{part}{n}" for part in "qk" for n in (1, 2)}, set()),
        (GPTNeoXJapaneseConfig, "falcon", {"attention.dense_bias"}, {"self_attention.dense.weight"}),
    ],
)
def test_an_unknown_architecture_is_compared_with_the_closest_families(tmp_path, config_class, like, unknown, missing):
    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = config_class(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    analysis = analyze(tmp_path)
    assert analysis.closest_families[0] == like
    for code, parts in (("refused_tensor", unknown), ("unfilled_parameter", missing)):
        found = [each.names[0] for each in analysis.findings if each.code == code]
        assert all(any(name.endswith(part) for name in found) for part in parts)


def test_layer_kinds_are_told_apart():
    analysis = published_analysis("gpt-oss-20b")
    kinds = {kind.kind: (kind.layers, kind.max_tokens, kind.bytes_per_token) for kind in analysis.sizes.kv_cache}
    each = 2 * 8 * 64 * 2
    assert kinds == {"window": (12, 128, 12 * each), "full": (12, None, 12 * each)}


@pytest.mark.parametrize(
    ("name", "expected"), [("gemma-4-e2b", 2.28), pytest.param("gemma-4-e4b", 4.64, marks=pytest.mark.slow)]
)
def test_active_parameters_are_without_the_embeddings_of_layers(name, expected):
    """2.3 and 4.6 of "effective" parameters, as Gemma's makers call them."""
    assert published_analysis(name).sizes.parameters.active / 1e9 == pytest.approx(expected, rel=0.006)


def test_equal_layers_share_a_row_of_the_tree():
    modules = published_analysis("gemma-4-e2b").modules
    assert [row.name for row in modules if row.depth == 2 and row.name.startswith("layers.")] == [
        *("layers.0-3,5-8,10-13", "layers.4,9,14", "layers.15-18,20-23,25-28,30-33", "layers.19,24,29,34")
    ]
    [window, full, *_] = [row.settings for row in modules if row.module == "NormedValuesAttention"]
    assert {"head_dim 256", "num_kv_heads 1", "span (sliding_window 512)"} <= {*window}
    assert {"head_dim 512"} <= {*full}
    assert not any(words.startswith("span") for words in full)


def test_a_tree_in_order_of_calls_is_the_forward_pass(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of_two_layers("qwen3-8b")))
    modules = analyze(tmp_path / "config.json", in_order_of_calls=True).modules
    assert [(row.name, row.shapes) for row in modules if row.depth == 3] == [
        ("input_layernorm", "[T, 4096] -> [T, 4096]"),
        ("self_attn", "[T, 4096] -> [T, 4096]"),
        ("post_attention_layernorm", "[T, 4096] -> [T, 4096]"),
        ("mlp", "[T, 4096] -> [T, 4096]"),
    ]
    assert [(row.name, row.shapes) for row in modules if row.depth == 4][:4] == [
        ("q_proj", "[T, 4096] -> [T, 4096]"),
        ("k_proj", "[T, 4096] -> [T, 1024]"),
        ("v_proj", "[T, 4096] -> [T, 1024]"),
        ("q_norm", "[T, 32, 128] -> [T, 32, 128]"),
    ]
    assert modules[0].file == "models/qwen3.py"


def test_an_unknown_key_fails(tmp_path):
    analysis = analyzed(tmp_path, of_two_layers("qwen3-8b") | {"brand_new_switch": True})
    [finding] = analysis.findings
    assert (finding.code, finding.names) == ("unknown_key", ("brand_new_switch",))
    assert statuses(analysis)["brand_new_switch"] == "unread"
    assert analysis.sizes is not None, "the rest is told all the same"


def test_a_key_that_another_family_has_names_it(tmp_path):
    analysis = analyzed(tmp_path, read("deepseek-v3") | {"num_hidden_layers": 4, "index_topk": 2048})
    assert statuses(analysis)["index_topk"] == "unread"
    [finding] = analysis.findings
    assert finding.names == ("index_topk",)
    assert "known to deepseek_v32, deepseek_v4, glm_moe_dsa" in finding.sentence


def test_every_refused_value_is_reported_not_only_the_first(tmp_path):
    values = of_two_layers("llama-3.1-8b") | {"hidden_act": "mish", "rope_scaling": {"rope_type": "spiral"}}
    analysis = analyzed(tmp_path, values)
    assert any("hidden_act='mish'" in each.sentence for each in analysis.findings)
    assert any("'spiral'" in each.sentence for each in analysis.findings)
    keys = statuses(analysis)
    assert keys["hidden_act"] == keys["rope_scaling.rope_type"] == "refused"
    assert keys["hidden_size"] == "used"


def test_a_refused_setting_of_the_rope_is_one_reason(tmp_path):
    values = of_two_layers("llama-3.1-8b")
    [finding] = analyzed(tmp_path, values | {"rope_scaling": {"rope_type": "linear", "factor": -1}}).findings
    assert "factor -1, expected a number above 0" in finding.sentence


def test_statuses_tell_what_is_used_from_what_is_assumed_anyway(tmp_path):
    values = of_two_layers("qwen3-8b") | {"attention_bias": False, "rope_theta": 1e6, "sliding_window": None}
    keys = statuses(analyzed(tmp_path, values))
    assert keys["rope_theta"] == keys["hidden_size"] == "used"
    assert keys["attention_bias"] == keys["sliding_window"] == "default"
    assert keys["initializer_range"] == keys["transformers_version"] == "neutral"
    assert statuses(analyzed(tmp_path, values | {"attention_bias": True}))["attention_bias"] == "used"


def test_an_unsupported_checkpoint_format_leaves_the_rest_of_the_report(tmp_path):
    values = of_two_layers("llama-3.1-8b")
    whole = analyzed(tmp_path, values)
    analysis = analyzed(tmp_path, values | {"quantization_config": {"quant_method": "aqlm", "nbits": 2}})
    [finding] = analysis.findings
    assert "AQLM" in finding.sentence
    keys = statuses(analysis)
    assert {keys["quantization_config.quant_method"], keys["quantization_config.nbits"]} == {"refused"}
    assert analysis.sizes.parameters == whole.sizes.parameters


@pytest.mark.parametrize("given", ["folder", "config.json"])
def test_a_quantization_described_beside_config_json_is_reported(tmp_path, given):
    (tmp_path / "config.json").write_text(json.dumps(of_two_layers("llama-3.1-8b")))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NONE_THAT_IS_KNOWN"}}')
    analysis = analyze(tmp_path if given == "folder" else tmp_path / "config.json")
    assert not analysis.can_run
    assert statuses(analysis)["quantization_config.quant_algo"] == "refused"


def test_a_model_type_that_contradicts_the_architecture_is_a_reason(tmp_path):
    analysis = analyzed(tmp_path, of_two_layers("llama-3.1-8b") | {"model_type": "mistral"})
    assert not analysis.can_run
    assert any("'LlamaForCausalLM'" in each.sentence and "'mistral'" in each.sentence for each in analysis.findings)


def test_a_required_key_that_is_missing_is_a_reason(tmp_path):
    values = read("qwen3-8b")
    del values["num_attention_heads"]
    analysis = analyzed(tmp_path, values)
    assert not analysis.can_run
    assert any("has no 'num_attention_heads'" in each.sentence for each in analysis.findings)


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
