"""Methods of `LLM` for embedding models and classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.host.interrupt import interrupt_deferred
from jaxis.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxis.pooling.embedder import Embedder
from jaxis.pooling.pairs import Texts, as_texts
from jaxis.prompts import Prompt, as_prompt_list, check_tokenization_kwargs


class PoolingMethods:
    """Base class of `LLM` with the methods for vectors and scores. `LLM` opens the model."""

    _embedder: Embedder | None

    def _check_open(self) -> None:
        raise NotImplementedError

    @property
    def _pooler(self) -> Embedder:
        self._check_open()
        if self._embedder is None:
            raise RequestError("this model generates text: LLM(model, runner='pooling') makes vectors with it")
        return self._embedder

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Computes the vectors of texts. On CPU, they are the same, bit for bit, whatever other texts are in the call.

        Args:
          prompts: One or many texts, as in `generate`.
          truncate_prompt_tokens: Number of tokens to keep of a longer input; -1 is as many as the model takes. None: an
            input that is too long is an error.
          prompt_name: Kind of the texts, such as "query", for which the checkpoint has a prompt.
          use_tqdm: Accepted as in vLLM; without effect.
          lora_request: Accepted as in vLLM; must be None.
          tokenization_kwargs: Accepted as in vLLM; must be empty.

        Returns:
          One output for each input, in order.

        Raises:
          RequestError: An input is empty or too long, an argument cannot be honoured, or the model generates text;
            nothing was computed.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        check_tokenization_kwargs(tokenization_kwargs)
        if self._pooler.classifier is not None:
            raise RequestError("this model makes scores and no vectors: use classify or score")
        with interrupt_deferred():
            found = self._pooler.embed(
                as_prompt_list(prompts), truncate_tokens=truncate_prompt_tokens, kind=prompt_name
            )
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput(each.vector.tolist()), each.token_ids, each.prompt)
            for number, each in enumerate(found)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Computes the score of each label for texts. On CPU, they are the same, bit for bit, whatever is in the call.

        Args:
          prompts: One or many texts, as in `generate`.
          truncate_prompt_tokens: Number of tokens to keep, as in `embed`.
          use_activation: True to convert logits to probabilities: by a sigmoid for one label, a softmax for several, or
            as the
            checkpoint's config.json says.
          use_tqdm: Accepted as in vLLM; without effect.
          lora_request: Accepted as in vLLM; must be None.
          tokenization_kwargs: Accepted as in vLLM; must be empty.

        Returns:
          One output for each input, in order.

        Raises:
          RequestError: An input is invalid, as in `embed`, or the model is not a classifier.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        check_tokenization_kwargs(tokenization_kwargs)
        classifier = self._pooler.classifier
        if classifier is None:
            raise RequestError("this model makes vectors and has no labels: use embed, or a checkpoint of a classifier")
        with interrupt_deferred():
            found = self._pooler.embed(as_prompt_list(prompts), truncate_tokens=truncate_prompt_tokens)
        return [
            ClassificationRequestOutput(
                str(number),
                ClassificationOutput(classifier.scores(each.vector[None], use_activation=use_activation)[0].tolist()),
                each.token_ids,
                each.prompt,
            )
            for number, each in enumerate(found)
        ]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts: by a cross-encoder that reads both, or by the cosine of their vectors.

        Args:
          data_1: One string that is paired with each of `data_2`, or as many strings as there; such as queries.
          data_2: One string or many, such as documents. A dict with "text" counts as a string.
          truncate_prompt_tokens: Number of tokens to keep, as in `embed`. A cross-encoder's pair loses tokens of its
            second text.
          use_activation: True to convert logits to probabilities, as in `classify`.
          instruction: Task in words, for models that use one, such as Qwen3-Reranker; None: that of the model card.
          use_tqdm: Accepted as in vLLM; without effect.
          lora_request: Accepted as in vLLM; must be None.

        Returns:
          One output for each pair, in order.

        Raises:
          RequestError: An input is invalid, as in `embed`; the lists' lengths differ; or the model is a classifier of
            several
            labels.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        first, second = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        with interrupt_deferred():
            found = self._pooler.score(
                first,
                second,
                truncate_tokens=truncate_prompt_tokens,
                use_activation=use_activation,
                instruction=instruction,
            )
        return [
            ScoringRequestOutput(str(number), ScoringOutput(score), token_ids)
            for number, (score, token_ids) in enumerate(found)
        ]


def _check_no_adapter(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError("lora_request is not supported by models that make vectors or scores: merge the adapter")
