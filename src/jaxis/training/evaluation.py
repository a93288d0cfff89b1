"""Measurements during training: the loss of held-out rows, and a user's scores of answers to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.sampling_params import SamplingParams
from jaxis.training.base_model import BaseModel
from jaxis.training.config import TrainConfig
from jaxis.training.data import Split
from jaxis.training.held_out_prompts import HeldOutPrompts
from jaxis.training.live_engine import LiveEngine
from jaxis.training.scorer import Scorer, load_scorer, scores_of
from jaxis.training.step import Evaluate

Measured = dict[str, float]


def held_out_loss(evaluate: Evaluate, trained: Any, frozen: Any, validation: Split) -> Measured:
    """Returns the mean loss of all held-out rows and the objective's other values. Names begin with `eval_`."""
    batches = validation.batches
    sums: dict[str, list[float]] = {}
    weights: list[float] = []
    for i in range(batches.steps_per_epoch):
        loss, weight, reported = evaluate(trained, frozen, validation.placed(batches.batch(i)))
        weights.append(float(weight))
        for name, value in {"loss": loss, **reported}.items():
            sums.setdefault(f"eval_{name}", []).append(float(value))
    return {name: math.fsum(values) / math.fsum(weights) for name, values in sums.items()}


class AnswerScores:
    """Answers held-out prompts with the current weights and scores the answers.

    Attributes:
      name: Name of the score among the metrics.

    Raises:
      ConfigError: The function does not exist, or a data row has no prompt.
    """

    def __init__(self, config: TrainConfig, base: BaseModel, validation: Split, progress: ProgressDisplay) -> None:
        self._function_name = config.training.metrics_function or ""
        self._scorer: Scorer = load_scorer(self._function_name, "training.metrics_function")
        self.name = f"eval_{self._function_name.partition(':')[2]}"
        self._max_tokens = config.training.max_completion_length
        longest = config.model.model_max_length or base.context
        self._prompts = HeldOutPrompts(validation.rows, base.tokenizer, base.template, longest - self._max_tokens)
        self._engine = LiveEngine(base, self._prompts.longest + self._max_tokens, progress)

    def measure(self, model: JaxModule, step: int, write: Callable[[dict[str, Any]], None]) -> Measured:
        """Returns the mean score of the model after `step` steps; `write` writes a line about an answer."""
        greedy = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        found = self._engine.answers(model, self._prompts.ids, [greedy] * len(self._prompts.ids))
        answered = self._prompts.answered([each.text for each in found], [each.token_ids for each in found])
        scores = scores_of(self._scorer, f"training.metrics_function={self._function_name!r}", answered)
        for where, prompt, answer, score in zip(self._prompts.where, answered["prompts"], found, scores, strict=True):
            write({"step": step, "row": where, "prompt": prompt, "answer": answer.text, "score": score})
        return {self.name: math.fsum(scores) / len(scores)}

    def close(self) -> None:
        self._engine.close()
