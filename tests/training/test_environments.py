"""Answers of several turns, whose tools are a user's: what is learned of them, and what the model reads."""

import itertools
import json
import sys
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.training.environments import tool_schema
from jaxis.training.objectives import MISMATCH, VOCAB_MISMATCH
from jaxis.training.trainer import Trainer
from tests.support import training

ENVIRONMENT = """
import json

class Calculator:
    def reset(self, left, right, **columns):
        self.expected, self.results = left + right, []
        return " Use your tool." if left % 2 else None

    def calculate(self, expression: str) -> str:
        \"\"\"Calculate an expression.

        Args:
            expression: The expression.
        \"\"\"
        left, operator, right = expression.split()
        assert operator == "+", "only sums"
        self.results.append(int(left) + int(right))
        return json.dumps({"result": self.results[-1]})

    def get_reward(self):
        return float(self.expected in self.results)

def is_closed(completions, environments, **columns):
    return [float(len(messages) > 2) for messages in completions]
"""
SUMS = [(34, 55), (41, 37), (62, 90)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory whose modules are found."""
    (tmp_path / "calculator.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("calculator", None)


def config_of(folder, **settings):
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "left": a, "right": b} for a, b in SUMS]
    grpo = {
        **{"num_generations": 4, "max_completion_length": 64, "log_completions": True},
        **{"environment_factory": "calculator:Calculator", **settings.pop("grpo", {})},
    }
    return training.train_config(
        None,
        training.write_rows(folder / "prompts.jsonl", rows),
        folder / "out",
        peft={"lora_r": 4, "lora_dropout": 0.0},
        **{
            **{"trainer_type": "TRL_GRPO", "forward_pass": "engine", "max_steps": 2, "grpo": grpo},
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
            **settings,
        },
    )


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
@pytest.mark.production_xla
def test_answers_call_tools_and_training_sees_what_was_sampled(here):
    config = config_of(here, reward_functions=["calculator:is_closed"])
    trainer = Trainer(config, lambda _: None)
    drawn = []
    draw = trainer.data.draw

    def kept(context):
        drawn.append(draw(context)[0])
        return draw(context)

    trainer.data.draw = kept
    trainer.run(ProgressDisplay(enabled=False))
    lines, answers = lines_of(here / "out" / "metrics.jsonl"), lines_of(here / "out" / "answers.jsonl")
    assert [(line[MISMATCH], line[VOCAB_MISMATCH]) for line in lines] == [(0.0, 0.0)] * 2
    assert all(line["tools/call_frequency"] > 0 for line in lines)
    assert {"rewards/Calculator", "rewards/is_closed"} <= lines[0].keys()
    first = answers[:12]
    assert any([message["role"] for message in each["answer"]][:2] == ["assistant", "tool"] for each in first)
    for number, each in enumerate(first):
        row = divmod(number, 4)
        ids, learned = drawn[0].ids[row][: drawn[0].seq_lens[row][0]].tolist(), [False, *drawn[0].learned[row].tolist()]
        left, right = SUMS[int(each["row"].rpartition(" ")[2]) - 1]
        question = f"What is {left} + {right}?" + (" Use your tool." if left % 2 else "")
        tools = trainer.data.environments.tools
        expected = [
            trainer.base.tokenizer.apply_chat_template([{"role": "user", "content": question}], tools=tools),
            *(
                f"\n<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
                for message in each["answer"]
                if message["role"] == "tool"
            ),
        ]
        parts = [
            (is_learned, trainer.base.tokenizer.decode([ids[i] for i in places], skip_special_tokens=False))
            for is_learned, places in itertools.groupby(range(len(ids)), learned.__getitem__)
        ]
        assert [text for is_learned, text in parts if not is_learned] == expected
        said = [message for message in each["answer"] if message["role"] == "assistant"]
        for message, text in zip(said, [text for is_learned, text in parts if is_learned], strict=True):
            assert text.startswith(message["content"])
            for call in message.get("tool_calls", ()):
                assert json.dumps(call["function"]["arguments"]) in text


def look(place: str, far: bool = False, names: list[str] | None = None) -> str:
    """Look at a place.

    It may be far away.

    Args:
        place: Which one,
            by its name.
        far: Whether it is far away.
        names: What else it
          is called.

    Returns:
        What is there.
    """
    return place


def choose(kind: Literal["a", "b"], sizes: dict[str, int], value: int | str, rest: Any = None) -> float:
    """Choose one.

    Args:
        kind: Of it.
        sizes (`dict`): By name.
        value: Its value.
        rest: All else.
    """
    return 0.0


def wait() -> None:
    """Wait."""


@pytest.mark.parametrize("function", [look, choose, wait], ids=lambda function: function.__name__)
def test_a_tool_is_described_as_transformers_describes_it(function):
    assert tool_schema(function, "it") == get_json_schema(function)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Calculator:\n    def look(self):\n        'Look.'", "has no method reset"),
        ("class Calculator:\n    def reset(self, **_): ...", "has no tools"),
        ("class Calculator:\n    def reset(self, **_): ...\n    def look(self, x): 'Look.'", "'x' has no type hint"),
        ("class Calculator:\n    def reset(self, **_): ...\n    def look(self, x: int): 'Look.'", "not describe"),
        ("class Calculator:\n    def reset(self, **_): ...\n    def look(self): ...", "look has no docstring"),
        ("class Calculator:\n    def reset(self, **_): ...\n    async def look(self): 'Look.'", "look is async"),
        ("class Calculator:\n    def reset(self, **_): ...\n    def look(self): 'Look.'", "has no method get_reward"),
        ("class Calculator:\n    def __init__(self): raise ValueError('x')", "failed: ValueError: x"),
    ],
)
def test_what_is_no_environment_is_said(source, message, here):
    (here / "calculator.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        Trainer(config_of(here), lambda _: None)
