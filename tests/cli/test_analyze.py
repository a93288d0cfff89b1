"""`jaxis analyze`: its text, its JSON, its exit codes."""

import json
import re

import pytest

from tests.support.places import TESTS
from tests.support.published_models import unsupported

CONFIGS = TESTS / "data" / "configs"


def test_text_fits_80_columns_and_has_no_colours_where_it_is_piped(run_jaxis, cli_environment, monkeypatch, checkpoint):
    monkeypatch.setitem(cli_environment, "COLUMNS", "80")
    result = run_jaxis("analyze", checkpoint())
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in result.stdout
    assert lines[1] == "can run"
    assert re.search(r"tensors +all \d+ match\n", result.stdout)
    for section in ("Modules (each with --tree)", "Keys of config.json", "Weights", "KV cache in bfloat16"):
        assert section in lines


def test_json_is_one_object_of_a_fixed_schema(invoke, checkpoint):
    result = invoke("analyze", checkpoint(), "--json", "--memory", "1GiB")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert list(facts) == [
        *("schema", "status", "can_run", "fits", "model", "architectures", "findings", "keys", "modules"),
        *("num_tensors", "bytes_by_dtype", "not_checked", "sizes", "closest_families"),
    ]
    assert (facts["schema"], facts["can_run"], facts["fits"], facts["findings"]) == (3, True, True, [])
    assert facts["architectures"] == ["Qwen3ForCausalLM"]
    assert set(facts["keys"][0]) == {"key", "value", "use", "because"}
    assert set(facts["modules"][0]) == {"depth", "name", "module", "file", "settings", "shapes"}
    sizes = facts["sizes"]
    assert list(sizes) == [
        *("parameters", "kv_cache_dtype", "kv_cache", "max_context", "memory_name", "memory_bytes", "fits")
    ]
    assert set(sizes["parameters"]) == {"total", "embedding", "experts", "active"}
    assert set(sizes["kv_cache"][0]) == {"kind", "layers", "bytes_per_token", "max_tokens"}
    assert set(sizes["fits"][0]) == {"weights", "weight_bytes", "fits", "context_tokens"}


def test_what_cannot_run_exits_with_1_and_says_why_on_stdout(invoke, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(unsupported()))
    result = invoke("analyze", path)
    assert result.exit_code == 1
    assert result.stderr == ""
    assert "cannot run" in result.stdout
    assert "unlike deepseek_v32: unknown key: num_hash_layers, o_groups: models of other" in " ".join(
        result.stdout.split()
    )
    facts = json.loads(invoke("analyze", path, "--json").stdout)
    assert facts["can_run"] is False
    assert facts["modules"] is None
    finding = next(each for each in facts["findings"] if each["code"] == "unknown_key")
    assert finding == {
        **{"code": "unknown_key", "names": ["num_hash_layers"], "count": 1, "like": "deepseek_v32"},
        "sentence": "models of other families compute with it; known to deepseek_v4",
    }


def test_tree_is_the_forward_pass_with_files(invoke, checkpoint):
    result = invoke("analyze", checkpoint(), "--tree")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names.index("self_attn") < names.index("q_proj") < names.index("o_proj") < names.index("mlp")
    assert "(layers/grouped_query_attention.py)" in result.stdout


def test_json_knows_no_infinity(invoke):
    facts = json.loads(invoke("analyze", CONFIGS / "nemotron-h-56b.json", "--json").stdout)
    [limit] = [key["value"] for key in facts["keys"] if key["key"] == "time_step_limit"]
    assert limit == [0.0, "Infinity"]


@pytest.mark.parametrize(("memory", "code"), [("1K", 1), ("1G", 0)])
def test_a_given_memory_must_hold_it(invoke, checkpoint, memory, code):
    assert invoke("analyze", checkpoint(), "--memory", memory).exit_code == code


def test_the_cache_type_changes_its_figures(invoke, checkpoint):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        result = invoke("analyze", checkpoint(), "--json", "--kv-cache-dtype", dtype)
        sizes[dtype] = json.loads(result.stdout)["sizes"]["kv_cache"][0]["bytes_per_token"]
    assert sizes["float32"] == 2 * sizes["bfloat16"]


def test_verbose_names_neutral_keys(invoke, checkpoint):
    assert "initializer_range" not in invoke("analyze", checkpoint()).stdout
    assert "initializer_range" in invoke("analyze", checkpoint(), "--verbose").stdout
