"""Measurements during training: the loss of held-out rows, a user's scores of answers to them, and the best step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.sampling_params import SamplingParams
from jaxis.training.answers import HeldOutPrompts, LiveEngine, Scorer, load_scorer, scores_of
from jaxis.training.base_model import BaseModel
from jaxis.training.checkpoint import BestStep, TrainState
from jaxis.training.config import TrainConfig
from jaxis.training.config.training import TrainingParams
from jaxis.training.data import Split
from jaxis.training.objectives import Objective
from jaxis.training.run_log import RunLog
from jaxis.training.step import make_evaluation
from jaxis.training.trainable import Trainable

Measured = dict[str, float]


class HeldOutEvaluation:
    """Evaluation of held-out rows at the configured steps of a training.

    Args:
      params: Arguments of the training.
      validation: Held-out examples; None: no evaluation.
      scores: Scores of generated answers; None: none.
      steps_per_epoch, num_steps: Number of steps of an epoch of training data, and of the whole training.

    Attributes:
      best: Best step so far; None: none is tracked.
    """

    def __init__(
        self,
        params: TrainingParams,
        model: Trainable,
        objective: Objective,
        validation: Split | None,
        scores: AnswerScores | None,
        steps_per_epoch: int,
        num_steps: int,
    ) -> None:
        self._model, self._validation, self._scores = model, validation, scores
        self._every = steps_per_epoch if params.eval_strategy == "epoch" else params.eval_steps
        self._num_steps = num_steps
        self.best: BestStep | None = None
        if (metric := params.best_metric) is not None:
            self.best = BestStep(metric, params.is_greater_better)
        self._evaluate = make_evaluation(model.forward(is_training=False), objective, model.combine, model.placement)

    def is_due(self, step: int) -> bool:
        """Returns whether the model is evaluated after so many steps."""
        return self._validation is not None and (step % self._every == 0 or step == self._num_steps)

    def measure(self, state: TrainState, log: RunLog) -> bool:
        """Measures and logs the held-out rows; returns whether this step is the best so far."""
        measured = self._held_out_loss(state)
        said = f"step {state.step}  held-out loss {measured['eval_loss']:.4f}"
        if self._scores is not None:
            scored = self._scores.measure(self._model.bind(state.trained), state.step, log.write_answer)
            said += "".join(f"  {name.removeprefix('eval_')} {value:.4f}" for name, value in scored.items())
            measured |= scored
        log.note(said)
        log.write({"step": state.step, **measured})
        return self.best is not None and self.best.improves(state.step, measured)

    def _held_out_loss(self, state: TrainState) -> Measured:
        """Returns the mean loss of all held-out rows and the objective's other values. Names begin with `eval_`."""
        assert self._validation is not None
        batches = self._validation.batches
        sums: dict[str, list[float]] = {}
        weights: list[float] = []
        for i in range(batches.steps_per_epoch):
            batch = self._validation.placed(batches.batch(i))
            loss, weight, reported = self._evaluate(state.trained, self._model.frozen, batch)
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
