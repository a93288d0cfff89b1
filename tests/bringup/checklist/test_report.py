"""The bring-up report."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxis.bringup.checklist.checklist import Report, make_report
from jaxis.bringup.checklist.report_page import report_markdown
from jaxis.errors import ConfigError

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "<model> & config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def report(config: Path) -> Report:
    return make_report(str(config))


@pytest.mark.slow
def test_every_item_is_ticked_from_what_was_seen(report: Report):
    assert report.passed
    assert [item.title.partition(":")[0] for item in report.items] == [
        "Architecture analysis",
        "Feature implementation",
        "Checkpoint conversion",
        "Unit testing",
        "Logit verification",
        "Decode test, on every path",
        "Documentation",
    ]
    evidence = {item.title.partition(":")[0]: " ".join(item.evidence) for item in report.items}
    assert "8 of 128" in evidence["Architecture analysis"]
    assert "jaxis.models.qwen3_moe.Qwen3MoeForCausalLM" in evidence["Feature implementation"]
    assert evidence["Checkpoint conversion"].count("bit for bit the same") == 2
    assert "float32" in evidence["Unit testing"]
    assert "bfloat16, 500 tokens" in evidence["Logit verification"]
    assert "float32: greedy tokens equal the reference's for 24 of 24" in evidence["Decode test, on every path"]
    assert {result.dtype for result in report.verifications} == {"float32", "bfloat16"}
    assert {result.weights for result in report.verifications} == {"tiny twin"}


@pytest.mark.slow
def test_json_has_the_evidence_itself(report: Report):
    found = json.loads(report.to_json())
    assert found["passed"] is True
    assert len(found["checklist"]) == len(report.items)
    assert found["verifications"][0]["versions"].keys() >= {"jaxis", "jax", "torch", "transformers"}
    assert found["analysis"]["can_run"] is True
    assert [trip["passed"] for trip in found["conversions"]] == [True, True]


@pytest.mark.slow
def test_markdown_ticks_and_shows_commands(report: Report):
    text = report_markdown(report)
    assert text.count("- [x] ") == len(report.items)
    assert f"`jaxis verify {report.model} --dtype bfloat16`" in text


@pytest.mark.slow
def test_an_item_that_is_not_ticked_shows(report: Report):
    items = (dataclasses.replace(report.items[0], passed=False), *report.items[1:])
    failed = dataclasses.replace(report, items=items)
    assert not failed.passed
    assert "- [ ] **Architecture analysis**" in report_markdown(failed)
    assert json.loads(failed.to_json())["passed"] is False


def test_a_model_that_cannot_run_has_no_report(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"made_up_scale": 3, "num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"cannot run.*made_up_scale"):
        make_report(str(path))
