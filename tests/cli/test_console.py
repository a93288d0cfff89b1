"""Words of the commands about an answer's speed."""

import pytest

from jaxis.cli import console
from jaxis.cli.console import AnswerStats


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([], "3 prompt tokens, 0 generated"),
        ([(0.5, 1)], "3 prompt tokens, 1 generated, all after 0.500 s"),
        # Seven tokens within a millisecond would be 7,000 tokens/s.
        ([(0.5, 1), (0.501, 7)], "3 prompt tokens, 8 generated, all after 0.501 s"),
        ([(0.5, 1), (0.599, 100)], "3 prompt tokens, 101 generated, all after 0.599 s"),
        ([(0.5, 1), (9.5, 7)], "3 prompt tokens, 8 generated, all after 9.500 s"),
        (
            [(0.5, 2), (1.0, 4), (1.5, 6)],
            "3 prompt tokens, 12 generated, first token after 0.500 s, then 10.0 tokens/s",
        ),
    ],
)
def test_a_speed_is_given_where_there_is_one(monkeypatch, arrivals, expected):
    now = 100.0
    monkeypatch.setattr(console.time, "perf_counter", lambda: now)
    stats = AnswerStats()
    stats.num_prompt_tokens = 3
    for seconds, num_tokens in arrivals:
        now = 100.0 + seconds
        stats.add(num_tokens)
    assert str(stats) == expected
    stats.seed = 7
    assert str(stats) == f"{expected}, seed 7"
