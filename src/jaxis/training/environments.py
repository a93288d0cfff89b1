"""Answers of several turns: episodes, a user's environments, and the schemas of the tools that answers call."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from jaxis.errors import ConfigError, RequestError
from jaxis.outputs import CompletionOutput
from jaxis.parsing.call_ids import call_fields
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.tool_parsers.tools import function_tools
from jaxis.tokenizer.chat_messages import messages_for_template
from jaxis.training.answers import HeldOutPrompts, load_scorer, scores_of
from jaxis.training.base_model import BaseModel
from jaxis.training.turns import TurnEncoder


@dataclass
class Episode:
    """A prompt and the tokens after it, of one turn or several, sampled by the engine or returned by tools.

    Attributes:
      prompt, completion: Prompt and answer as a string or messages.
      ids: Token ids after the prompt.
      is_sampled: For each of `ids`, True if the engine sampled it; False if a tool returned it.
      logprobs: Log-probability of each sampled token when it was sampled; 0.0 for the others.
      is_cut: True if the answer ended because the limit was reached.
      environment: Instance of the user's environment; None without one.
      num_calls: Number of tool calls.
      num_failed: Number of calls that raised an error or named an unknown tool.
    """

    prompt: str | list[dict[str, Any]]
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion: str | list[dict[str, Any]] = ""
    is_cut: bool = False
    num_accepted_drafts: int = 0
    environment: Any = None
    num_calls: int = 0
    num_failed: int = 0

    def add_sampled(self, answer: CompletionOutput) -> None:
        """Adds the tokens of an answer, which must have log-probabilities."""
        assert answer.logprobs is not None
        self.ids += answer.token_ids
        self.is_sampled += [True] * len(answer.token_ids)
        self.logprobs += [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        self.is_cut = answer.finish_reason == "length"
        self.num_accepted_drafts += answer.num_accepted_drafts

    def add_given(self, ids: list[int]) -> None:
        self.ids += ids
        self.is_sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)


_KEY = "training.grpo.environment_factory"
_NO_TOOLS = ("reset", "get_reward")


class Environments:
    """A user's environment class, as TRL's `environment_factory`, of which each answer gets an instance.

    The instance's public methods are the tools that the answer may call. `reset(**columns)` is called first, with the
    columns of the data row and its `prompt`. If it returns a string, that is appended to the last message of the
    prompt. `get_reward()`, if present, is one more reward function.

    Args:
      name: Name such as "games:Maze".
      base: Model whose chat template defines the format of calls and results.
      max_calling_turns: Limit of an answer's turns that call tools; None: no limit.
      max_tokens: Limit of an answer's tokens, including tool results.

    Attributes:
      tools: JSON schemas of the tools, for the chat template.
      skip_special_tokens: True if the text of an answer is read without special tokens.
      rewards_as: Name of the reward of `get_reward`; None without that method.

    Raises:
      ConfigError: The class does not exist, a method cannot be a tool, or the model does not support tools.
    """

    def __init__(self, name: str, base: BaseModel, max_calling_turns: int | None, max_tokens: int) -> None:
        self._name, self._base = name, base
        self._max_calling_turns, self._max_tokens = max_calling_turns, max_tokens
        self._factory = load_scorer(name, _KEY)
        instance: Any = self._new()
        methods = dict(inspect.getmembers(type(instance), predicate=inspect.isfunction))
        if "reset" not in methods:
            raise ConfigError(f"{_KEY}={name!r} has no method reset, which is called before each answer: write one")
        self._tool_names = [each for each in methods if each not in _NO_TOOLS and not each.startswith("_")]
        if not self._tool_names:
            raise ConfigError(f"{_KEY}={name!r} has no tools: give it public methods other than reset and get_reward")
        for each, method in methods.items():
            if inspect.iscoroutinefunction(method):
                raise ConfigError(f"{_KEY}={name!r}: {each} is async, which is not supported: make it a plain method")
        self.tools = [tool_schema(getattr(instance, each), f"{_KEY}={name!r}: {each}") for each in self._tool_names]
        self._functions = function_tools(self.tools)
        self.rewards_as = type(instance).__name__ if "get_reward" in methods else None
        self._parsers = ModelParsers.select(base.tokenizer, base.hf_config.get("model_type"))
        if self._parsers.tool is None:
            raise ConfigError(
                f"{_KEY} needs a model that calls tools: the chat template of {base.name} shows no format"
            )
        self.skip_special_tokens = not self._parsers.needs_special_tokens
        self._turns = TurnEncoder(base.tokenizer, base.template)

    def begin(self, prompts: HeldOutPrompts, place: int, longest: int) -> Episode:
        """Creates and resets the environment of an answer to prompt number `place`.

        A prompt has at most `longest` tokens. Raises ConfigError if `reset` failed, or its text is too long.
        """
        prompt, where = prompts.prompts[place], prompts.where[place]
        if isinstance(prompt, str):
            raise ConfigError(f"{where}: {_KEY} needs a prompt of messages, not a string")
        environment: Any = self._new()
        try:
            observation = environment.reset(**prompts.columns_of(place), prompt=prompt)
        except Exception as error:
            raise ConfigError(f"{where}: {self._name}.reset failed: {type(error).__name__}: {error}") from error
        if observation is None:
            return Episode(prompt, prompts.ids[place], completion=[], environment=environment)
        if not isinstance(observation, str):
            kind = type(observation).__name__
            raise ConfigError(f"{where}: {self._name}.reset returned {kind}: return a string or None")
        prompt = [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1].get('content') or ''}{observation}"}]
        ids = prompts.encode(prompt, self.tools)
        if len(ids) > longest:
            raise ConfigError(
                f"{where}: with what {self._name}.reset returned, its prompt has {len(ids)} tokens, more than "
                f"{longest}: raise training.grpo.max_prompt_length"
            )
        return Episode(prompt, ids, completion=[], environment=environment)

    def goes_on(self, episode: Episode, answer: CompletionOutput, turn: int) -> bool:
        """Calls the tools that an answer asks for in a turn, from 0, and adds their results to the episode.

        The episode already has the answer's tokens. Returns True if the model is to answer again. Raises ConfigError if
        the chat template does not support tool results.
        """
        assert isinstance(episode.completion, list)
        assert isinstance(episode.prompt, list)
        num_before = len(episode.prompt_ids) + len(episode.ids) - len(answer.token_ids)
        before = self._base.tokenizer.decode(
            [*episode.prompt_ids, *episode.ids][:num_before], skip_special_tokens=False
        )
        parser = OutputParser(self._parsers.tool, self._parsers.reasoning, tools=self._functions, prompt=before)
        parsed = parse_output(parser, answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        calls = [call_fields(call, f"{turn}:{number}") for number, call in enumerate(parsed.tool_calls)]
        for call in calls:
            call["function"]["arguments"] = _arguments(call)
        if calls and answer.finish_reason == "stop":
            message["tool_calls"] = calls
        episode.completion.append(message)
        if "tool_calls" not in message or turn == self._max_calling_turns:
            return False
        results = [self._call(episode, call) for call in calls]
        ids = self._ids_of_results([*episode.prompt, *episode.completion], results)
        if len(episode.ids) + len(ids) >= self._max_tokens:
            episode.is_cut = True
            return False
        episode.completion += results
        episode.add_given(ids)
        return True

    def rewards(self, answered: dict[str, list[Any]]) -> list[float]:
        """Returns the reward that `get_reward` gives each answer.

        Raises ConfigError if it raised an error, or did not return a finite number.
        """

        def of_all(environments: list[Any], **_: Any) -> list[float]:
            return [environment.get_reward() for environment in environments]

        return scores_of(of_all, f"{self._name}.get_reward", answered)

    def _new(self) -> Any:
        try:
            return self._factory()
        except Exception as error:
            raise ConfigError(f"{_KEY}={self._name!r} failed: {type(error).__name__}: {error}") from error

    def _call(self, episode: Episode, call: Mapping[str, Any]) -> dict[str, Any]:
        """Calls a tool; returns the message with its result."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        episode.num_calls += 1
        try:
            if name not in self._tool_names:
                raise ValueError(f"Tool {name} not found.")
            result = getattr(episode.environment, name)(**arguments)
        except Exception as error:
            # The model reads the error, and may do better in its next turn.
            episode.num_failed += 1
            result = {"error": str(error)}
        return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": str(result)}

    def _ids_of_results(self, messages: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[int]:
        """Returns the tokens between the end of the assistant's last turn and its next one."""
        base = self._base
        written = messages_for_template(
            [*messages, *results], base.tokenizer, chat_template=base.template.get("chat_template"), tools=self.tools
        )
        try:
            turn = self._turns.encode(written[: len(messages)], self.tools).ids
        except RequestError as error:
            raise ConfigError(f"{_KEY}: the chat template cannot write a call of a tool: {error}") from None
        whole = base.tokenizer.encode_chat(written, tools=self.tools, add_generation_prompt=True, **base.template)
        if whole[: len(turn)] != turn:
            raise ConfigError(
                f"{_KEY}: the chat template of {base.name} writes a call otherwise once its result is known: give "
                "model.chat_template, one that keeps earlier turns"
            )
        return whole[len(turn) :]


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(call["function"]["arguments"])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_TYPES: dict[Any, dict[str, Any]] = {
    **{str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"}},
    **{list: {"type": "array"}, dict: {"type": "object"}, type(None): {"type": "null"}, Any: {}},
}
_SECTION = re.compile(r"(Args|Returns|Raises):")
_ARGUMENT = re.compile(r"(\w+)(?: \([^()]*\))?:\s*(.*)")


def tool_schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Returns the JSON schema of a function in OpenAI's format, from its type hints and docstring.

    transformers makes it so for tools. The docstring, in Google's style, describes each argument. Raises ConfigError,
    which names `where`, if a type hint or the description of an argument is missing, or a type has no JSON schema.
    """
    text, arguments, returned = _described(inspect.getdoc(function) or "")
    if not text:
        raise ConfigError(f"{where} has no docstring, which would tell the model what it does: write one")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"{where}: a type hint cannot be read: {error}") from None
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints:
            raise ConfigError(f"{where}: its argument {name!r} has no type hint: give it one")
        if name not in arguments:
            raise ConfigError(f'{where}: its docstring does not describe the argument {name!r}: do, under "Args:"')
        if (schema := _schema_of(hints[name])) is None:
            raise ConfigError(
                f"{where}: its argument {name!r} is {hints[name]}: give it a type that JSON has, such as str, int, "
                "list[str] or Literal"
            )
        properties[name] = {**schema, "description": arguments[name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    described = {"name": function.__name__, "description": text, "parameters": parameters}
    if "return" in hints and (schema := _schema_of(hints["return"])) is not None:
        described["return"] = schema | ({"description": returned} if returned else {})
    return {"type": "function", "function": described}


def _schema_of(hint: Any) -> dict[str, Any] | None:
    """Returns the schema of a type; None if JSON has none."""
    if isinstance(hint, Hashable) and hint in _TYPES:
        return dict(_TYPES[hint])
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        kinds = list(dict.fromkeys(_TYPES[type(part)]["type"] for part in parts))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(parts)}
    if origin in (Union, types.UnionType):
        return _schema_of_union(parts)
    inner = _schema_of(parts[-1]) if origin in (list, dict) else None
    if inner is None:
        return None
    return {**_TYPES[origin], "items" if origin is list else "additionalProperties": inner}


def _schema_of_union(parts: tuple[Any, ...]) -> dict[str, Any] | None:
    others = [_schema_of(part) for part in parts if part is not type(None)]
    schemas = [schema for schema in others if schema is not None]
    if len(schemas) < len(others):
        return None
    nullable = {"nullable": True} if len(others) < len(parts) else {}
    if len(schemas) == 1:
        return schemas[0] | nullable
    if all(schema.keys() == {"type"} for schema in schemas):
        return {"type": sorted({schema["type"] for schema in schemas})} | nullable
    return {"anyOf": schemas} | nullable


def _described(doc: str) -> tuple[str, dict[str, str], str]:
    """Returns a docstring's descriptions of the function, of each argument and of the result."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in doc.splitlines():
        if found := _SECTION.fullmatch(line.strip()):
            current = found[1]
            sections[current] = []
        else:
            sections[current].append(line)
    arguments: dict[str, str] = {}
    name, margin = "", None
    for line in filter(str.strip, sections.get("Args", ())):
        indent = len(line) - len(line.lstrip())
        margin = indent if margin is None else margin
        if indent <= margin and (found := _ARGUMENT.fullmatch(line.strip())):
            name, arguments[found[1]] = found[1], found[2]
        elif name:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(sections[""]).strip(), arguments, "\n".join(sections.get("Returns", ())).strip()
