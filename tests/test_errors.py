"""Errors are one line of a bounded length, whatever they quote."""

import pytest

from jaxis.errors import CheckpointError, ConfigError, EngineError, RequestError


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, EngineError, RequestError])
def test_what_a_message_quotes_is_cut_in_its_middle(kind):
    message = str(kind(f"model.gguf has {'x' * 66_000_000!r}, expected a type: download it again"))
    assert len(message) < 2100
    assert message.startswith("model.gguf has 'xxx")
    assert message.endswith("expected a type: download it again")
    assert "[... 65998" in message


def test_a_requests_error_stays_bounded_under_another_name():
    error = RequestError(f"={'y' * 10_000} must be positive", param="top_p").about("p")
    assert len(str(error)) < 2100
    assert len(error.message) < 2100
    assert str(error).startswith("p=yyy")
    assert str(error).endswith("must be positive")


def test_messages_of_usual_length_are_as_they_are():
    assert str(ConfigError("z" * 2000)) == "z" * 2000
