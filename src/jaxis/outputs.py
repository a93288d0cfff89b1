"""The outputs of a request, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, in the distribution that `SamplingParams.logprobs_mode` names.

    Attributes:
      logprob: Natural logarithm of the probability; in the modes of logits, the logit.
      rank: 1 for the most likely token of the vocabulary.
      decoded_token: Text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """An input's vector.

    Attributes:
      embedding: Elements of the vector.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of elements."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one input.

    Attributes:
      request_id: Number of the input in the call.
      outputs: Vector of the input.
      prompt_token_ids: Tokens that the model read.
      prompt: Text, after the checkpoint's prompt, if there is one; None if it was given as token ids.
      finished: True.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    prompt: str | None = None
    finished: bool = True


@dataclass(frozen=True)
class ClassificationOutput:
    """A classifier's result for one input.

    Attributes:
      probs: Score of each label: probabilities, unless the checkpoint asks for something else.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """The result of `LLM.classify` for one input; its fields are those of `EmbeddingRequestOutput`."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    prompt: str | None = None
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The similarity or relevance of two texts.

    Attributes:
      score: Score, the larger the better. A cross-encoder's is the one that its checkpoint asks for, a probability by
        default; a model that makes vectors gives their cosine.
    """

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair.

    Attributes:
      request_id: Number of the pair in the call.
      outputs: Score of the pair.
      prompt_token_ids: Tokens that the model read: the pair, or, in a model that makes vectors, one input after the
        other.
      finished: True.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


FIRST_VERSION = 0
"""Version of the weights that an engine begins with."""


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: Number of this completion among the request's `n`.
      text: Generated text.
      token_ids: Generated token ids, the end-of-sequence or stop token included.
      cumulative_logprob: Sum of the tokens' log-probabilities, if logprobs were asked for.
      logprobs: For each token, token id -> Logprob, the sampled one first, if asked for.
      finish_reason: "stop", "length" or "abort"; None while unfinished.
      stop_reason: Stop string or stop token id that ended it; None for end-of-sequence.
      num_accepted_predictions: Number of its tokens that were guessed right from `SamplingParams.prediction`.
      num_rejected_predictions: Number of tokens that were guessed wrong from there.
      kept_mass: For each token, the share of the probability after temperature that top-k, top-p and min-p left to draw
        from; only with logprobs in a processed mode.
      num_drafts: Number of tokens that were guessed ahead, by any method.
      num_accepted_drafts: Number of right ones among them.
      routed_experts: Once finished, if asked for: the experts of each token of prompt and output but the last, which
        the model has not read; uint8 or uint16 [T, layers with experts, k], the best of each layer first.
      weight_versions: For each token, the version of the weights that sampled it, FIRST_VERSION for the engine's first
        ones; None if the weights have not been updated.
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
        """True if the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's prompt and its completions so far, or, in a stream, their additions.

    Attributes:
      request_id: Name of the request in the engine.
      prompt: Text of the prompt; None if it was given as token ids.
      prompt_token_ids: Token ids of the prompt.
      prompt_logprobs: For each prompt token, token id -> Logprob (None for the first token), if asked for.
      outputs: One CompletionOutput for each of `n`.
      finished: True if every completion has ended.
      num_cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
      first_scheduled_time: Start of the request's first step, in seconds of `time.monotonic`; set by AsyncLLMEngine.
      first_token_time: Time of its first token, on the same clock; set by AsyncLLMEngine.
      kv_transfer_params: Parameters with which another engine finds the prompt's blocks here, if asked for.
      seed: `SamplingParams.seed`, or the seed drawn in its place: with it, the same request gets the same tokens.
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


def merge_outputs(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Merges consecutive deltas of one request into the first, which it modifies."""
    outputs = iter(outputs)
    merged = next(outputs)
    completions = {completion.index: completion for completion in merged.outputs}
    for output in outputs:
        for new in output.outputs:
            if new.index in completions:
                _extend(completions[new.index], new)
            else:
                completions[new.index] = new
        merged.finished = output.finished
        merged.kv_transfer_params = merged.kv_transfer_params or output.kv_transfer_params
        merged.prompt_logprobs = merged.prompt_logprobs or output.prompt_logprobs
    merged.outputs = [completions[index] for index in sorted(completions)]
    return merged


def _extend(completion: CompletionOutput, new: CompletionOutput) -> None:
    if new.weight_versions is not None:
        before = completion.weight_versions or [FIRST_VERSION] * len(completion.token_ids)
        completion.weight_versions = [*before, *new.weight_versions]
    completion.text += new.text
    completion.token_ids += new.token_ids
    if completion.logprobs is not None:
        completion.logprobs += new.logprobs or []
    if completion.kept_mass is not None:
        completion.kept_mass += new.kept_mass or []
    completion.cumulative_logprob = new.cumulative_logprob
    completion.finish_reason = new.finish_reason
    completion.stop_reason = new.stop_reason
    completion.num_accepted_predictions = new.num_accepted_predictions
    completion.num_rejected_predictions = new.num_rejected_predictions
    completion.routed_experts = new.routed_experts
    completion.num_drafts, completion.num_accepted_drafts = new.num_drafts, new.num_accepted_drafts


@dataclass(frozen=True)
class StreamOutput:
    """The addition of one step to a streamed completion.

    Attributes:
      text: New text; may be empty while a character or a stop string is incomplete.
      token_ids: New token ids.
      cumulative_logprob: Sum of all the completion's log-probabilities so far, if logprobs were asked for.
      logprobs: Log-probabilities of the new tokens, if asked for.
      finish_reason: "stop", "length" or "abort" in the last one, else None.
      stop_reason: Stop string or stop token id that ended it; None for end-of-sequence.
      num_prompt_tokens: Tokens of the prompt.
      num_cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
      weight_versions: Versions of the new tokens' weights; see `CompletionOutput`.
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    weight_versions: list[str | int] | None = None
