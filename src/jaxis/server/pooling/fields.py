"""Fields that requests for vectors and scores share, and the usage in their answers."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.pooling.async_pooling import MAX_TEXTS
from jaxis.server.http.body import LenientModel, NotApplied, TokenId
from jaxis.server.openai.not_applied import ACCOUNT_FIELDS

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]

_SETTINGS = "the checkpoint's own settings are used: leave it out"
# Fields of vLLM and of other servers.
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
    """Fields of all pooling requests.

    Attributes:
      model: Served name; None for the server's only model.
      truncate_prompt_tokens: Length to which longer inputs are cut; -1 for the model's limit. None refuses inputs that
        are too long.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = NOT_APPLIED

    model: str | None = None
    truncate_prompt_tokens: int | None = None


class ScoringRequest(PoolingRequest):
    """Fields of requests for scores.

    Attributes:
      use_activation: False returns a classifier's logits instead of probabilities; None means True.
      activation, softmax: Older names of `use_activation` in vLLM.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        name: value for name, value in NOT_APPLIED.items() if name not in ("use_activation", "activation", "softmax")
    }

    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None

    @property
    def activates(self) -> bool:
        """True if the request asks for probabilities.

        Raises:
          RequestError: Two of the names have different values.
        """
        given = {each for each in (self.use_activation, self.activation, self.softmax) if each is not None}
        if len(given) > 1:
            raise RequestError("and its older names say different things: send one", param="use_activation")
        return given != {False}


class PoolingUsage(BaseModel):
    """Tokens of a request, which generates none."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> PoolingUsage:
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)
