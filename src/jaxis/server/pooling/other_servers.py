"""Requests and answers of Ollama's and llama-server's endpoints of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.pooling.client.async_pooling import MAX_TEXTS
from jaxis.server.http.body import LenientModel, NotApplied
from jaxis.server.ollama.ollama_schema import OllamaOptions
from jaxis.server.pooling.embeddings import Inputs
from jaxis.server.pooling.fields import PoolingRequest


class OllamaEmbedRequest(LenientModel):
    """Request of /api/embed.

    Attributes:
      input: A string or a list of strings; None or an empty one only loads the model.
      truncate: True or None cuts strings that are too long; False refuses them.
      dimensions: Number of elements to return, for models trained with vectors that can be cut.
      keep_alive: Without effect; the model stays loaded.
    """

    model: str | None = None
    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(BaseModel):
    """Answer of /api/embed, with durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingRequest(LenientModel):
    """Request of /api/embeddings, with one string; see `OllamaEmbedRequest`."""

    model: str | None = None
    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(BaseModel):
    """Answer of /api/embeddings."""

    embedding: list[float]


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
