"""Engine arguments and parameters that commands make of their options."""

import pytest

from jaxis.cli.options import chat_params
from jaxis.sampling_params import SamplingParams


def test_a_model_without_sampling_settings_is_chatted_with_gently_and_that_is_said(capsys):
    params = chat_params(SamplingParams(max_tokens=None), {"top_k": 5})
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.8, 0.95, 5, None)
    said = capsys.readouterr().err
    assert said.startswith("The model brings no sampling settings: temperature 0.8, top_p 0.95, as in llama.cpp")
    assert said.count("\n") == 1


@pytest.mark.parametrize("brought", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 64}, {"min_p": 0.05}])
def test_settings_of_the_model_stay_as_they_are(brought, capsys):
    defaults = SamplingParams(**brought)
    assert chat_params(defaults, {}) == defaults
    assert chat_params(defaults, {"temperature": 0.3}).temperature == 0.3
    assert capsys.readouterr().err == ""


def test_a_given_temperature_needs_no_explanation(capsys):
    assert chat_params(SamplingParams(), {"temperature": 0.2}).temperature == 0.2
    assert capsys.readouterr().err == ""
