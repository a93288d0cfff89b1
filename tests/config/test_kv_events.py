"""`kv_events_config` is read as vLLM reads it, and refused in one line where it cannot be honoured."""

import pytest

from jaxis.config.kv_events import KVEventsConfig
from jaxis.errors import ConfigError


def test_nothing_is_published_unless_it_is_asked_for():
    for given in (None, {}, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert KVEventsConfig.of(given) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yes", "kv_events_config='yes' must be a dict"),
        ({"enabled": True}, "unknown key 'enabled'; known: enable_kv_cache_events, publisher, endpoint"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1 must be of type bool"),
        ({"hwm": "many"}, "hwm='many' must be of type int"),
        ({"replay_endpoint": 5558}, "replay_endpoint=5558 must be of type str"),
        ({"publisher": "kafka"}, "publisher='kafka' must be zmq or null"),
        ({"buffer_steps": 0}, "buffer_steps, hwm and max_queue_size must be at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        KVEventsConfig.of(given)
