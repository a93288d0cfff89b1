"""The prompts of data rows, the answers of the model in training to them, and a user's scores of these."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.setup import BuiltEngine, build_engine
from jaxis.errors import ConfigError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.jsonl.conversation import Role
from jaxis.layers.module import JaxModule
from jaxis.offline_requests import OfflineRequests, WantedRequest
from jaxis.outputs import CompletionOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import messages_for_template
from jaxis.training.base_model import BaseModel
from jaxis.training.config import TrainConfig
from jaxis.training.rows import DataRow, Dialogue, Preference, of_each
from jaxis.training.turns import check_template


class HeldOutPrompts:
    """The part of each data row before its last answer, encoded as a server would send it to the model.

    Args:
      template: Arguments of `Tokenizer.apply_chat_template`.
      max_tokens: Length of the longest prompt in tokens.
      tools: JSON schemas of functions that the model may call; None: those of each data row.

    Attributes:
      ids: Token ids of each prompt.
      prompts: Source of each prompt: a string, or messages.
      where: Place of each prompt's data row.
      longest: Length of the longest prompt in tokens.

    Raises:
      ConfigError: A data row has no prompt, or one that is too long. The error names the first such row.
    """

    def __init__(
        self,
        rows: Sequence[DataRow],
        tokenizer: Tokenizer,
        template: Mapping[str, Any],
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.where = [row.where for row in rows]
        self._tokenizer, self._template = tokenizer, template
        self._columns: dict[str, list[Any]] = {
            name: [row.columns.get(name) for row in rows]
            for name in sorted({key for row in rows for key in row.columns})
        }

        def prompt_of(row: DataRow) -> tuple[Any, list[int], str]:
            prompt, ids, reference = self._prompt(row, tools)
            if len(ids) > max_tokens:
                raise RequestError(f"its prompt of {len(ids)} tokens leaves no room for an answer")
            return prompt, ids, reference

        found = of_each(rows, prompt_of)
        self.prompts: list[Any] = [prompt for prompt, _, _ in found]
        self.ids: list[list[int]] = [ids for _, ids, _ in found]
        self._columns.setdefault("reference", [reference for _, _, reference in found])
        self.longest = max(map(len, self.ids))

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Returns the token ids of a conversation that the model is to continue.

        Raises RequestError if the chat template refuses the conversation.
        """
        source = self._template.get("chat_template")
        check_template(self._tokenizer)
        written = messages_for_template(messages, self._tokenizer, chat_template=source, tools=tools)
        return self._tokenizer.encode_chat(written, tools=tools, add_generation_prompt=True, **self._template)

    def columns_of(self, place: int) -> dict[str, Any]:
        return {name: values[place] for name, values in self._columns.items()}

    def answered(
        self, completions: Sequence[Any], completion_ids: Sequence[list[int]], places: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """Returns arguments of a scoring function. Conversations and their answers are lists of messages.

        `places` has the index of each answer's prompt; None: one answer to every prompt, in order.
        """
        places = range(len(self.prompts)) if places is None else places
        prompts = [self.prompts[place] for place in places]
        return {
            **{name: [values[place] for place in places] for name, values in self._columns.items()},
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": completion}]
                if isinstance(prompt, list) and isinstance(completion, str)
                else completion
                for prompt, completion in zip(prompts, completions, strict=True)
            ],
            "completion_ids": list(completion_ids),
        }

    def _prompt(self, row: DataRow, tools: Sequence[Mapping[str, Any]] | None) -> tuple[Any, list[int], str]:
        """Returns the prompt of a data row, its token ids, and the row's own answer."""
        content = row.content.chosen if isinstance(row.content, Preference) else row.content
        if not isinstance(content, Dialogue):
            if not content.prompt:
                raise RequestError("has no prompt to answer")
            return content.prompt, self._tokenizer.encode(content.prompt), content.completion
        last = max(i for i, message in enumerate(content.messages) if message["role"] == Role.ASSISTANT)
        if not last:
            raise RequestError("has no prompt to answer: it begins with the assistant")
        prompt = [dict(message) for message in content.messages[:last]]
        ids = self.encode(prompt, content.tools if tools is None else tools)
        return prompt, ids, content.messages[last].get("content") or ""


_MAX_NUM_SEQS = 16


def answer_seed(words: Sequence[int]) -> int:
    """Returns the seed of an answer, from words such as the seed of the run, the step and the answer's number."""
    # NumPy guarantees the stream of this generator, whatever its version.
    return int(np.random.RandomState(words).randint(2**31 - 1))


class LiveEngine:
    """Answers prompts with the weights in training, without a copy. Its programs are compiled once.

    `max_model_len` limits a prompt and its answer together, in tokens.
    """

    def __init__(self, base: BaseModel, max_model_len: int) -> None:
        self._base, self._max_model_len = base, max_model_len
        self._built: BuiltEngine | None = None
        self._model: JaxModule | None = None

    def answers(
        self,
        model: JaxModule,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        progress: ProgressDisplay,
    ) -> list[CompletionOutput]:
        """Answers each prompt, given as token ids, by its sampling parameters.

        The model has the same structure in each call. If it is the model of the last call, its prefix cache is reused.
        `progress` displays the start of the engine. Raises EngineError if there is no memory for a cache, or logits are
        not finite.
        """
        requests = OfflineRequests(self._with_weights(model, progress), progress)
        wanted = [WantedRequest(TokenizedPrompt(None, ids), each) for ids, each in zip(prompts, params, strict=True)]
        return [output.outputs[0] for output in requests.run(wanted)]

    def close(self) -> None:
        if self._built is not None:
            self._built.engine.close()

    def _with_weights(self, model: JaxModule, progress: ProgressDisplay) -> BuiltEngine:
        base = self._base
        if self._built is None:
            args = EngineArgs(
                model=str(base.path),
                dtype="bfloat16" if base.compute_dtype == jnp.bfloat16 else "float32",
                max_num_seqs=_MAX_NUM_SEQS,
                max_model_len=self._max_model_len,
            )
            self._built = build_engine(args, progress, weights=model, tokenizer=base.tokenizer)
        elif model is not self._model:
            self._built.weights.update(model)
        self._model = model
        return self._built


Scorer = Callable[..., Sequence[float]]
"""Function of prompts, completions, completion_ids and, by name, other columns of the data rows. It returns a score of
each completion, as TRL's reward functions do."""


def load_scorer(name: str, key: str) -> Scorer:
    """Imports a function that scores answers, such as "scores:exact" from scores.py.

    Modules of the working directory are found, too. Raises ConfigError, which names the configuration's `key`, if the
    function does not exist.
    """
    module_name, _, function_name = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise ConfigError(f"{key}={name!r} cannot be imported: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: the module {module_name} has no function {function_name!r}")
    return cast(Scorer, function)


def scores_of(scorer: Scorer, name: str, answered: dict[str, list[Any]]) -> list[float]:
    """Computes the scores of answers by the user's function of this name, from its arguments, lists of equal length.

    Raises ConfigError if the function raised an error, or did not return a finite number for each answer.
    """
    count = len(answered["completions"])
    try:
        scores = [float(score) for score in scorer(**answered)]
    except Exception as error:
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}") from error
    if len(scores) != count or not all(map(math.isfinite, scores)):
        raise ConfigError(f"{name} returned {scores[:3]}...; it must return {count} finite numbers, one an answer")
    return scores


class AnswerScores:
    """Answers held-out prompts with the current weights and scores the answers.

    Attributes:
      name: Name of the score among the metrics.

    Raises:
      ConfigError: The function does not exist, or a data row has no prompt.
    """

    def __init__(
        self, config: TrainConfig, base: BaseModel, rows: Sequence[DataRow], progress: ProgressDisplay
    ) -> None:
        self._function_name = config.training.metrics_function or ""
        self._scorer: Scorer = load_scorer(self._function_name, "training.metrics_function")
        self.name = f"eval_{self._function_name.partition(':')[2]}"
        self._max_tokens = config.training.kwargs.max_completion_length
        longest = config.model.model_max_length or base.context
        self._prompts = HeldOutPrompts(rows, base.tokenizer, base.template, longest - self._max_tokens)
        self._engine, self._progress = LiveEngine(base, self._prompts.longest + self._max_tokens), progress

    def measure(self, model: JaxModule, step: int, write: Callable[[dict[str, Any]], None]) -> dict[str, float]:
        """Returns the mean score of the model after `step` steps; `write` writes a line about an answer."""
        greedy = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        params = [greedy] * len(self._prompts.ids)
        found = self._engine.answers(model, self._prompts.ids, params, self._progress)
        answered = self._prompts.answered([each.text for each in found], [each.token_ids for each in found])
        scores = scores_of(self._scorer, f"training.metrics_function={self._function_name!r}", answered)
        for where, prompt, answer, score in zip(self._prompts.where, answered["prompts"], found, scores, strict=True):
            write({"step": step, "row": where, "prompt": prompt, "answer": answer.text, "score": score})
        return {self.name: math.fsum(scores) / len(scores)}

    def close(self) -> None:
        self._engine.close()
