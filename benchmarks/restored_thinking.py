"""How many tokens agents' turns have read again, because clients leave out what the model thought.

    python benchmarks/restored_thinking.py
    python benchmarks/restored_thinking.py --turns 1000 --words 60

Runs no model. Agents call tools and ask new questions; the answers are drawn, with thinking, and become token ids as a
model could have sampled them, which is not always as a tokenizer splits their text. Each turn's prompt is made as the
server makes it, without and with what it remembers, of messages that have no thinking. Read again are the tokens of the
last prompt and answer that the new prompt does not begin with, and that a prefix cache therefore does not find.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import statistics
from pathlib import Path
from random import Random
from typing import Any

import jaxis
from jaxis import SamplingParams
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.prompts import TokenizedPrompt
from jaxis.server.generation.answer_format import AnswerFormat, choose_tools
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.prompts import ChatPrompt
from jaxis.server.generation.restored_thinking import RestoredThinking, keeps_thinking
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer import Tokenizer

_TURN = "<|im_start|>{{ m.role }}\n"
_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ '\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_THINKING = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
_END = (
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
_QUESTION = (
    "{% set state = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set state.question = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "keeps all thinking": _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.reasoning_content %}"
    + _THINKING
    + "{% endif %}"
    + _END,
    "keeps thinking since the last question": _TOOLS
    + _QUESTION
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.reasoning_content and loop.index0 > state.question %}"
    + _THINKING
    + "{% endif %}"
    + _END,
    "keeps no thinking": _TOOLS + "{# <think> #}{% for m in messages %}" + _TURN + _END,
}
WORDS = ["the", "file", "reads", "two", "values", "and", "writes", "none,", "so", "look", "again", "src/main.py:", "42"]
FUNCTION = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}


def served_model(template: str) -> ServedModel:
    """A model with the embedded model's tokenizer and another chat template."""
    tokenizer = copy.copy(Tokenizer.from_path(Path(jaxis.__file__).parent / "assets" / "tiny"))
    assert tokenizer is not None
    tokenizer.chat_templates = {"default": template}
    parsers = ModelParsers.select(tokenizer, None, tool="hermes", reasoning="deepseek_r1")
    return ServedModel(
        names=("model",),
        tokenizer=tokenizer,
        default_sampling_params=SamplingParams(),
        grammar_compiler=None,
        parsers=parsers,
    )


class Agent:
    """A conversation as a client keeps it, and as it was.

    Attributes:
      seen: The messages without thinking.
      whole: The same with it.
    """

    def __init__(self, random: Random, num_words: int) -> None:
        self._random, self._num_words = random, num_words
        question = {"role": "user", "content": self._text()}
        self.seen, self.whole = [question], [question]

    def grow(self) -> dict[str, Any]:
        """Adds an answer, and what comes after it; returns the answer with its thinking."""
        answer: dict[str, Any] = {"role": "assistant", "content": self._text()}
        result = {"role": "user", "content": self._text()}
        if self._random.random() < 0.8:
            call = {"name": FUNCTION["name"], "arguments": {"path": self._text()}}
            number = f"call{len(self.seen):05}"
            answer["tool_calls"] = [{"id": number, "type": "function", "function": call}]
            result = {"role": "tool", "tool_call_id": number, "name": FUNCTION["name"], "content": self._text()}
        thought = {**answer, "reasoning_content": self._text()}
        self.seen += [answer, result]
        self.whole += [thought, result]
        return thought

    def _text(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(self._num_words // 2, self._num_words)))


def sampled(tokenizer: Tokenizer, text: str, random: Random) -> list[int]:
    """Token ids of a string, some of which are not those that tokenizing it gives."""
    cuts = sorted({0, len(text), *(random.randrange(len(text)) for _ in range(len(text) // 200))})
    parts = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
    token_ids = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    whole = tokenizer.encode(text, add_special_tokens=False)
    return token_ids if tokenizer.decode(token_ids) == tokenizer.decode(whole) else whole


def answer_text(answer: dict[str, Any]) -> str:
    """What the model writes, up to its end of turn."""
    call = "".join(
        f'\n<tool_call>\n{{"name": "{c["function"]["name"]}", "arguments": {{"path": "'
        f'{c["function"]["arguments"]["path"]}"}}}}\n</tool_call>'
        for c in answer.get("tool_calls", ())
    )
    return f"<think>\n{answer['reasoning_content']}\n</think>\n\n{answer['content']}{call}<|im_end|>"


def common(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def run(template: str, memory: RestoredThinking, num_turns: int, num_words: int) -> tuple[list[int], list[int]]:
    """For each turn, the tokens that are read again, and the tokens of the prompt."""
    model, again, lengths = served_model(template), [], []
    tokenizer = model.tokenizer
    assert tokenizer is not None
    random = Random(0)
    tools = choose_tools(model, {"tools[0].function": FUNCTION}, "auto")
    answer_format = AnswerFormat.of_chat(model, tools, None)
    while len(again) < num_turns:
        agent, last = Agent(random, num_words), None
        for _ in range(12):
            job = GenerationJob(
                request_id="a",
                model=model,
                prompts=ChatPrompt(messages=[*agent.seen], tools=[{"type": "function", "function": FUNCTION}]),
                params=SamplingParams(),
                answer=answer_format,
            )
            [prompt] = memory.tokenize(job, "client")
            if last is not None:
                again.append(len(last) - common(last, list(prompt.token_ids)))
                lengths.append(len(prompt.token_ids))
            last = reply(memory, job, prompt, agent, random)
    return again[:num_turns], lengths[:num_turns]


def reply(
    memory: RestoredThinking, job: GenerationJob, prompt: TokenizedPrompt, agent: Agent, random: Random
) -> list[int]:
    """Answers a prompt, and lets the agent go on; returns the token ids of both."""
    tokenizer = job.model.tokenizer
    assert tokenizer is not None
    text = answer_text(agent.grow())
    token_ids = sampled(tokenizer, text, random)
    completion = CompletionOutput(0, text.removesuffix("<|im_end|>"), token_ids, finish_reason="stop")
    listener = memory.listen(job, prompt, "client")
    if listener is not None:
        listener.add(RequestOutput("a", None, [], None, [dataclasses.replace(completion)], finished=True))
    return [*prompt.token_ids, *token_ids]


def main() -> None:
    """Prints a line for each template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1000, help="of each template (default: %(default)s)")
    parser.add_argument("--words", type=int, default=60, help="at most of a string (default: %(default)s)")
    arguments = parser.parse_args()
    for name, template in TEMPLATES.items():
        model = served_model(template)
        assert model.tokenizer is not None
        memory = RestoredThinking()
        without, lengths = run(template, RestoredThinking(max_answers=0), arguments.turns, arguments.words)
        restored, longer = run(template, memory, arguments.turns, arguments.words)
        print(
            f"{name:40} restored: {keeps_thinking(model.tokenizer)!s:5}  read again: "
            f"{statistics.mean(without):.1f} of {statistics.mean(lengths):.0f} without, {statistics.mean(restored):.1f}"
            f" of {statistics.mean(longer):.0f} with; {len(memory)} answers, {memory.num_bytes / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
