"""The outputs of a request, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability; of which distribution, `SamplingParams.logprobs_mode` says.

    Attributes:
      logprob: Natural logarithm of the probability; in the modes of logits, the logit.
      rank: 1 for the most likely token of the vocabulary.
      decoded_token: The token's text, or None where there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """An input's vector.

    Attributes:
      embedding: Its numbers.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many they are."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` makes of one input.

    Attributes:
      request_id: Its number in the call.
      outputs: Its vector.
      prompt_token_ids: What the model saw.
      prompt: The text, with what the checkpoint's prompt put before it; None if it was given as token ids.
      finished: True.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    prompt: str | None = None
    finished: bool = True


@dataclass(frozen=True)
class ClassificationOutput:
    """What a classifier says of an input.

    Attributes:
      probs: The score of each label: probabilities, unless the checkpoint asks for something else.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """What `LLM.classify` makes of one input; see `EmbeddingRequestOutput`."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    prompt: str | None = None
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts go together.

    Attributes:
      score: The larger the better: of a cross-encoder what its checkpoint asks for, a probability unless it says
        otherwise; of a model that makes vectors their cosine.
    """

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """What `LLM.score` makes of one pair.

    Attributes:
      request_id: Its number in the call.
      outputs: Its score.
      prompt_token_ids: What the model saw: the pair, or, of a model that makes vectors, one input after the other.
      finished: True.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


FIRST_VERSION = 0
"""Of the weights that an engine begins with."""


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: Which of the request's `n` completions this is.
      text: The generated text.
      token_ids: The generated token ids, the end-of-sequence or stop token included.
      cumulative_logprob: Sum of the tokens' log-probabilities, if logprobs were asked for.
      logprobs: For each token, token id -> Logprob, the sampled one first, if asked for.
      finish_reason: "stop", "length" or "abort"; None while unfinished.
      stop_reason: The stop string or stop token id that ended it; None for end-of-sequence.
      num_accepted_predictions: Of its tokens, those that were guessed right from `SamplingParams.prediction`.
      num_rejected_predictions: Tokens that were guessed wrong from there.
      kept_mass: For each token, the share of the probability after temperature that top-k, top-p and min-p left to draw
        from; only with logprobs in a processed mode.
      num_drafts: Tokens that were guessed ahead, by whatever drafts.
      num_accepted_drafts: Of them, those that were right.
      routed_experts: Once finished, if asked for: the experts of each token of prompt and output but the last, which
        the model has not read; uint8 or uint16 [T, layers with experts, k], the best of each layer first.
      weight_versions: For each token, the version of the weights that it was sampled by, FIRST_VERSION of those that
        the engine began with; None if the weights have not been updated.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0
    kept_mass: list[float] | None = None
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    routed_experts: np.ndarray | None = None
    weight_versions: list[str | int] | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's prompt and its completions so far, or, in a stream, what is new of them.

    Attributes:
      request_id: The engine's name for the request.
      prompt: The prompt's text, or None if it was given as token ids.
      prompt_token_ids: The prompt's token ids.
      prompt_logprobs: For each prompt token, token id -> Logprob (None for the first token), if asked for.
      outputs: One CompletionOutput for each of `n`.
      finished: Whether every completion has ended.
      num_cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
      first_scheduled_time: When the request's first step began, in seconds of `time.monotonic`; set by AsyncLLMEngine.
      first_token_time: When its first token was there, on the same clock; set by AsyncLLMEngine.
      kv_transfer_params: With these, another engine finds the prompt's blocks here, if that was asked for.
      seed: `SamplingParams.seed`, or what was drawn in its place: with it, the same request gets the same tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    seed: int | None = None
