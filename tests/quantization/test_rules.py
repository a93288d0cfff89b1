"""Rules and short names: what is read from them, which module gets what, and every mistake in one line."""

import json

import pytest

from jaxis.errors import ConfigError
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.weight_format import WeightSlot
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import QuantizationRule, read_mapping, rules_from, rules_to_dict

RULES = [
    {"module_path": ".*lm_head"},
    {"module_path": ".*down_proj", "weight_qtype": "int8", "act_qtype": "int8"},
    {"module_path": ".*mlp.*", "weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "minmax"},
]
EXPECTED = (
    QuantizationRule(".*lm_head"),
    QuantizationRule(".*down_proj", "int8", "int8"),
    QuantizationRule(".*mlp.*", "int4", None, 32, "minmax"),
)


class Layer:
    weight_slots = (WeightSlot("weight", (8, 64), (None, None)),)


def test_rules_from_every_source(tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    (tmp_path / "qwix.yaml").write_text(
        "qwix:\n  rules:\n    - module_path: .*lm_head\n"
        "    - {module_path: .*down_proj, weight_qtype: int8, act_qtype: int8}\n"
        "    - module_path: .*mlp.*\n      weight_qtype: int4\n      tile_size: 32\n"
        "      weight_calibration_method: minmax\n"
    )
    additional = {"quantization": {"qwix": {"rules": RULES}}}
    for config in (
        parse_quantization(RULES),
        parse_quantization({"qwix": {"rules": RULES}}),
        parse_quantization(list(EXPECTED)),
        parse_quantization(tmp_path / "rules.json"),
        parse_quantization(str(tmp_path / "qwix.yaml")),
        parse_quantization(None, additional),
        parse_quantization(None, read_mapping(json.dumps(additional), "additional_config")),
    ):
        assert config.rules == EXPECTED


def test_nothing_asked_for():
    assert parse_quantization(None) is None
    assert parse_quantization(None, {}) is None


def test_rules_written_are_rules_read():
    assert rules_from(json.loads(json.dumps(rules_to_dict(EXPECTED))), "text") == EXPECTED


@pytest.mark.parametrize(
    ("name", "qtypes"),
    [
        ("int8", {"model.layers.0.mlp.up_proj": "int8", "model.embed_tokens": "int8", "lm_head": "int8"}),
        ("int4", {"model.layers.0.mlp.up_proj": "int4", "model.embed_tokens": "int8", "lm_head": "int8"}),
        ("none", {"model.layers.0.mlp.up_proj": None, "lm_head": None}),
    ],
)
def test_short_names(name, qtypes):
    config = parse_quantization(name)
    for module, qtype in qtypes.items():
        method = config.get_quant_method(Layer(), module)
        assert (method and method.scheme.weight_qtype) == qtype
        assert method is None or method.scheme.act_qtype == "int8"
    config.check_all_used()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_of_short_names_layers_that_groups_do_not_divide_get_int8_by_row(name):
    class Odd:
        weight_slots = (WeightSlot("weight", (8, 50), (None, None)),)

    config = parse_quantization(name)
    assert config.get_quant_method(Odd(), "model.odd").scheme == WeightScheme("int8", None, act_qtype="int8")
    assert config.get_quant_method(Layer(), "model.even").scheme.group_size == 32
    resolved = RuleQuantizationConfig(rules_from(rules_to_dict(config.resolved_rules), "text"))
    assert resolved.find("model.odd") == QuantizationRule(r"model\.odd", "int8", "int8")
    assert resolved.find("model.even") == config.find("model.even")


def test_the_first_rule_that_matches_the_whole_name_decides():
    config = RuleQuantizationConfig(EXPECTED)
    assert config.get_quant_method(Layer(), "lm_head") is None
    assert config.get_quant_method(Layer(), "model.layers.0.self_attn.q_proj") is None
    assert config.get_quant_method(Layer(), "model.mlp.down_proj").scheme.weight_qtype == "int8"
    with pytest.raises(ConfigError, match=r"module_path='\.\*mlp\.\*' applies to no module"):
        config.check_all_used()
    assert config.get_quant_method(Layer(), "model.mlp.up_proj").scheme.weight_qtype == "int4"
    config.check_all_used()


def test_a_part_of_the_name_is_no_match():
    assert RuleQuantizationConfig([QuantizationRule("proj", "int8")]).get_quant_method(Layer(), "q_proj") is None


def test_a_rule_that_another_hides_is_named():
    config = RuleQuantizationConfig([QuantizationRule(".*", "int8"), QuantizationRule("lm_head")])
    config.get_quant_method(Layer(), "lm_head")
    with pytest.raises(ConfigError, match="module_path='lm_head' applies to no module"):
        config.check_all_used()


def test_a_tile_that_does_not_divide_names_the_layer():
    config = RuleQuantizationConfig([QuantizationRule(".*", "int4", tile_size=48)])
    with pytest.raises(ConfigError, match=r"model\.x has 64 input features, which tile_size=48 does not divide"):
        config.get_quant_method(Layer(), "model.x")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"module_path": ".*", "weight_type": "int8"}, "rule 1 has the unknown key 'weight_type'; known: module_path"),
        ({"weight_qtype": "int8"}, "rule 1 has no module_path"),
        ({"module_path": 3}, "module_path=3 must be a regular expression"),
        ({"module_path": "a("}, r"module_path='a\(' is not a regular expression: .*unterminated"),
        ({"module_path": ".*", "weight_qtype": "float8_e4m3fn"}, "weight_qtype='float8_e4m3fn' is not supported"),
        ({"module_path": ".*", "weight_qtype": ["int8"]}, r"weight_qtype=\['int8'\] is not supported"),
        ({"module_path": ".*", "weight_qtype": "int8", "act_qtype": "int4"}, "act_qtype='int4' is not supported"),
        ({"module_path": ".*", "weight_qtype": "int4", "tile_size": 0}, "tile_size=0 must be an integer of at least 1"),
        ({"module_path": ".*", "weight_qtype": "int4", "tile_size": "32"}, "tile_size='32' must be an integer"),
        ({"module_path": ".*", "weight_qtype": "int4", "tile_size": True}, "tile_size=True must be an integer"),
        (
            {"module_path": ".*", "weight_qtype": "int4", "weight_calibration_method": "rms"},
            "weight_calibration_method='rms' is not supported; known: absmax, affine, minmax, mse",
        ),
        (
            {"module_path": ".*", "weight_qtype": "int8", "weight_calibration_method": "minmax"},
            "weight_calibration_method='minmax' is not for int8, which has 'absmax'",
        ),
        (
            {"module_path": ".*", "weight_qtype": "int5", "tile_size": 32},
            "weight_calibration_method='absmax' is not for int5, which has 'affine'",
        ),
        ({"module_path": ".*", "tile_size": 32}, "says how to quantize, but has no weight_qtype"),
        ("int8", "rule 1 is 'int8', not an object"),
    ],
)
def test_mistakes_in_a_rule(rule, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_quantization([rule])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("int9",),
            "'int9' is neither one of none, int8, int4, int8_activations, dequantize nor an existing YAML or JSON file",
        ),
        (([],), "quantization must be a list of quantization rules"),
        ((7,), "quantization must be a list of quantization rules"),
        (({"rules": RULES},), "quantization must be an object with the one key 'qwix', but has 'rules'"),
        (
            ({"qwix": {"rules": RULES, "x": 1}},),
            "qwix must be an object with the one key 'rules', but has 'rules', 'x'",
        ),
        (({"qwix": RULES},), "qwix must be an object with the one key 'rules'"),
        ((None, {"quantisation": {}}), "additional_config has the unknown key 'quantisation'; known: quantization"),
        ((None, [1]), r"additional_config=\[1\] must be a dict"),
        (("int8", {"quantization": {"qwix": {"rules": RULES}}}), "were both given: leave one out"),
        ((None, {"quantization": "int8"}), "must be a list of quantization rules"),
    ],
)
def test_mistakes_around_rules(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_quantization(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [("- module_path: [", "is not valid YAML"), (b"\xff\xfe\x00", "cannot be read"), ("3", "must be a list")],
)
def test_mistakes_in_a_file(tmp_path, content, message):
    path = tmp_path / "rules.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        parse_quantization(str(path))
    assert "rules.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("nowhere.json", "neither a JSON object nor an existing file")],
)
def test_mistakes_in_additional_config_text(text, message):
    with pytest.raises(ConfigError, match=message):
        read_mapping(text, "additional_config")
