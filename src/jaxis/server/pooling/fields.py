"""Fields that requests for vectors and scores share, and what of their answers is alike."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.pooling.client.async_pooling import MAX_TEXTS
from jaxis.server.http.body import LenientModel, NotApplied, TokenId
from jaxis.server.openai.not_applied import ACCOUNT_FIELDS

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]

_SETTINGS = "the checkpoint's own settings are used: leave it out"
# vLLM's, and those of other servers.
NOT_APPLIED: dict[str, NotApplied] = {
    **ACCOUNT_FIELDS,
    "add_special_tokens": NotApplied((True,), "the model was trained with its special tokens: leave it out"),
    "normalize": NotApplied((True,), _SETTINGS),
    "use_activation": NotApplied((True,), _SETTINGS),
    "activation": NotApplied((True,), _SETTINGS),
    "softmax": NotApplied((True,), _SETTINGS),
    "mm_processor_kwargs": NotApplied(({},), "inputs are text or token ids"),
    "messages": NotApplied(([],), "inputs are text or token ids: send them without roles"),
    "embedding_types": NotApplied((["float"],), "vectors are numbers of type float: leave it out"),
    "max_chunks_per_doc": NotApplied((), "documents are scored whole: leave it out, and see truncate_prompt_tokens"),
    "max_tokens_per_doc": NotApplied((), "documents are scored whole: leave it out, and see truncate_prompt_tokens"),
    "rank_fields": NotApplied((["text"],), "documents are strings, or objects with a `text`"),
}


class PoolingRequest(LenientModel):
    """What requests have alike.

    Attributes:
      model: A served name; none is the one model there is.
      truncate_prompt_tokens: How many tokens are left of a longer input; -1 is as many as the model takes. None: one
        that is too long is an error.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = NOT_APPLIED

    model: str | None = None
    truncate_prompt_tokens: int | None = None


class ScoringRequest(PoolingRequest):
    """What requests for scores have alike.

    Attributes:
      use_activation: Whether a classifier's logits become probabilities; none, and true, make them.
      activation, softmax: The same under vLLM's older names.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        name: value for name, value in NOT_APPLIED.items() if name not in ("use_activation", "activation", "softmax")
    }

    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether probabilities are asked for.

        Raises:
          RequestError: Two of the names say different things.
        """
        given = {each for each in (self.use_activation, self.activation, self.softmax) if each is not None}
        if len(given) > 1:
            raise RequestError("and its older names say different things: send one", param="use_activation")
        return given != {False}


class PoolingUsage(BaseModel):
    """Tokens of a request; nothing is generated."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> PoolingUsage:
        """The usage of so many tokens."""
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)
