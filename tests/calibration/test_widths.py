"""The choice of widths, against all choices there are."""

import itertools

import numpy as np
import pytest

from jaxis.calibration.sensitivity import ModuleSensitivity, Option
from jaxis.calibration.widths import WIDTH_RULES, WidthChoice, rules_of
from jaxis.errors import ConfigError
from jaxis.quantization.rules import RuleQuantizationConfig

BYTES_OF_BITS = (4.5, 5.5, 6.5, 8.25)


def module(name, num_weights, scale):
    """Errors fall by four for each bit, as those of rounding do."""
    options = [
        Option(rule, int(num_weights * bits / 8), scale * 4.0 ** -(bits - 4.5))
        for rule, bits in zip(WIDTH_RULES, BYTES_OF_BITS, strict=True)
    ]
    return ModuleSensitivity(name, num_weights, tuple(options))


@pytest.fixture
def modules():
    rng = np.random.default_rng(0)
    return [module(f"layers.{i}", int(rng.integers(1, 9)) * 8000, float(rng.exponential() ** 3)) for i in range(6)]


def total(options):
    return sum(o.num_bytes for o in options.values()), sum(o.kl for o in options.values())


def all_choices(modules):
    for options in itertools.product(*(each.options for each in modules)):
        yield sum(o.num_bytes for o in options), sum(o.kl for o in options)


@pytest.mark.parametrize("bits", [4.5, 4.6, 5.0, 5.77, 6.5, 8.25])
def test_within_bits_no_uniform_choice_is_better_and_hardly_any_at_all(modules, bits):
    budget = bits * sum(each.num_weights for each in modules) / 8
    num_bytes, kl = total(WidthChoice(modules).within_bits(bits))
    assert num_bytes <= budget
    best = min(kl for size, kl in all_choices(modules) if size <= budget)
    assert kl <= 1.3 * best
    uniform = [sum(each.options[i].kl for each in modules) for i, width in enumerate(BYTES_OF_BITS) if width <= bits]
    assert kl <= min(uniform) * (1 + 1e-9)


def test_every_allocation_on_the_way_is_the_best_of_its_size(modules):
    choice, everything = WidthChoice(modules), list(all_choices(modules))
    for number in range(len(choice)):
        size, kl = total(choice.options(number))
        assert (size, kl) == (choice.num_bytes[number], pytest.approx(choice.kl[number]))
        assert kl <= min(k for s, k in everything if s <= size) * (1 + 1e-9)


def test_fewer_bits_than_the_smallest_weights_are_refused(modules):
    with pytest.raises(ConfigError, match=r"target_bits=4.4 is less than the 4.50 bits"):
        WidthChoice(modules).within_bits(4.4)


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_within_kl_the_measured_divergence_decides_not_the_predicted(factor):
    modules = [module(f"layers.{i}", 8000 * (1 + i % 7), 1e-3 * (1 + i % 5) ** 3) for i in range(40)]
    choice, measured = WidthChoice(modules), []

    def measure(options):
        measured.append(total(options)[1] * factor + 1e-4)
        return measured[-1]

    found = choice.within_kl(0.2, measure)
    assert len(measured) <= 9
    assert total(found)[1] * factor + 1e-4 <= 0.2
    smallest = next(size for size, kl in zip(choice.num_bytes, choice.kl, strict=True) if kl * factor + 1e-4 <= 0.2)
    assert total(found)[0] <= 1.01 * smallest


def test_a_divergence_that_no_width_reaches_is_refused(modules):
    with pytest.raises(ConfigError, match=r"the widest weights already have a divergence of 0\.50000"):
        WidthChoice(modules).within_kl(0.1, lambda options: 0.5)


def test_an_option_that_is_larger_and_no_better_is_never_chosen():
    worse = Option(WIDTH_RULES[1], 200, 1.0)
    one = ModuleSensitivity("m", 100, (Option(WIDTH_RULES[0], 100, 0.5), worse, Option(WIDTH_RULES[3], 300, 0.1)))
    choice = WidthChoice([one])
    assert [choice.options(i)["m"].num_bytes for i in range(len(choice))] == [100, 300]


def test_rules_apply_to_one_module_each(modules):
    chosen = WidthChoice(modules).within_bits(5.5)
    config = RuleQuantizationConfig(rules_of(chosen))
    for name, option in chosen.items():
        assert config.find(name).weight_qtype == option.rule.weight_qtype
    assert config.find("layersx1") is None
    config.check_all_used()
