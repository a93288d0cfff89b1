"""Request and answer of llama-server's endpoint of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel

from jaxis.errors import RequestError
from jaxis.server.http.body import NotApplied
from jaxis.server.pooling.embeddings import Inputs
from jaxis.server.pooling.fields import PoolingRequest


class LlamaEmbeddingRequest(PoolingRequest):
    """Request of llama-server's /embedding.

    Attributes:
      content, input: A string, token ids, or a list of strings or of lists of token ids; exactly one of the two.
    """

    not_applied: ClassVar[Mapping[str, Any]] = {
        **PoolingRequest.not_applied,
        "embd_normalize": NotApplied((2,), "the checkpoint's own settings are used: leave it out"),
    }

    content: Inputs | None = None
    input: Inputs | None = None

    def given(self) -> tuple[str, Inputs]:
        """Returns the name of the field with the texts, and the texts.

        Raises:
          RequestError: None or both of the fields are set.
        """
        if (self.content is None) == (self.input is None):
            raise RequestError(
                "is missing" if self.content is None else "and input are the same: send one", param="content"
            )
        return ("content", self.content) if self.content is not None else ("input", self.input or "")


class LlamaEmbedding(BaseModel):
    """Vector of an input, as a list of one: llama-server returns one for each token if it does not pool."""

    index: int
    embedding: list[list[float]]
