from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxis.engine.grammar.delayed_grammar import DelayedGrammar
from jaxis.engine.grammar.matcher import Grammar
from jaxis.engine.grammar.thinking_budget import with_thinking_budget
from jaxis.errors import RequestError
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.server.generation.answer_format import AnswerFormat
from jaxis.server.generation.grammar import marks_before_answer
from jaxis.server.generation.prompts import JobPrompts
from jaxis.server.generation.served_model import ServedModel

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """A request to the engine, checked and ready to run, the same for every protocol.

    Attributes:
      model: The served model, under the name in the request.
      prompts: Prompts to answer or to continue.
      priority: Priority of the request; lower values are served first.
      stream: True if outputs are sent as they come, instead of all at the end.
    """

    request_id: str
    model: ServedModel
    prompts: JobPrompts
    params: SamplingParams
    answer: AnswerFormat
    priority: int = 0
    stream: bool = False

    def tokenize(self) -> list[TokenizedPrompt]:
        """Returns the job's prompts as `JobPrompts.tokenize` does, each with the model's adapter."""
        prompts = self.prompts.tokenize(self.model.tokenizer, self.model.images)
        if self.model.adapter:
            prompts = [dataclasses.replace(prompt, adapter=self.model.adapter) for prompt in prompts]
        return prompts

    @property
    def is_constrained(self) -> bool:
        return self.answer.grammar is not None or self.params.thinking_token_budget is not None

    def compile_grammar(self, prompt: TokenizedPrompt) -> Grammar | None:
        """Compiles the grammar of a prompt's answer, which may take seconds; None if answers are free.

        Raises RequestError if the grammar cannot be honoured.
        """
        if not self.is_constrained:
            return None
        assert self.model.grammar_compiler is not None  # a model that generates has one
        grammar = self._answer_grammar(prompt, self.model.grammar_compiler)
        if self.params.thinking_token_budget is None:
            return grammar
        parser, compiler = self.model.parsers.reasoning, self.model.grammar_compiler
        return with_thinking_budget(grammar, self.params, parser, prompt.text, prompt.token_ids, compiler)

    def params_with(self, grammar: Grammar | None) -> SamplingParams:
        """Returns the parameters of a prompt with this grammar. Without a grammar, the thinking budget is left out."""
        if grammar is not None or self.params.thinking_token_budget is None:
            return self.params
        return dataclasses.replace(self.params, thinking_token_budget=None)

    def _answer_grammar(self, prompt: TokenizedPrompt, compiler: GrammarCompiler) -> Grammar | None:
        if self.answer.grammar is None:
            return None
        grammar = self.answer.grammar.compile(compiler)
        if self.answer.grammar.holds_reasoning:
            return grammar
        tokenizer = self.model.tokenizer
        marks = marks_before_answer(self.answer.reasoning_parser, prompt.text or "", tokenizer)
        alternatives = () if self.answer.grammar.holds_calls else self.answer.tools.call_tokens
        if tokenizer is None or (marks is None and not alternatives):
            return grammar
        return DelayedGrammar(grammar, tokenizer, marks, alternatives)


def make_job(
    request_id: str,
    model: ServedModel,
    prompts: JobPrompts,
    settings: Mapping[str, Any],
    answer: AnswerFormat,
    *,
    priority: int | None = None,
    stream: bool | None = None,
) -> GenerationJob:
    """Returns the job of a request, with sampling parameters by name, as `sampling_params` takes them."""
    params = sampling_params(model, settings, answer)
    return GenerationJob(
        request_id=request_id,
        model=model,
        prompts=prompts,
        params=params,
        answer=answer,
        priority=priority or 0,
        stream=bool(stream),
    )


def sampling_params(model: ServedModel, given: Mapping[str, Any], answer: AnswerFormat) -> SamplingParams:
    """Returns the sampling parameters of a request, given by name; None selects the model's default.

    Raises RequestError if the parameters cannot be honoured.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    _check_stops(settings.get("stop", ()))
    defaults = model.default_sampling_params
    transfer = settings.get("extra_args", {}).get("kv_transfer_params")
    min_tokens, max_tokens = settings.get("min_tokens", defaults.min_tokens), settings.get("max_tokens")
    # The request's limit overrides the model's default, and a proxy's for a prefill the client's own.
    is_prefill = transfer is not None and transfer.get("do_remote_decode") is True
    if max_tokens is not None and ("min_tokens" not in settings or is_prefill):
        settings["min_tokens"] = min(min_tokens, max_tokens)
    if answer.needs_special_tokens:
        settings["skip_special_tokens"] = False
    if not settings.get("ignore_eos", defaults.ignore_eos):
        own = settings.get("stop_token_ids", defaults.stop_token_ids)
        settings["stop_token_ids"] = [*own, *sorted(model.end_token_ids - set(own))]
    settings |= _thinking_budget(model, settings)
    if answer.grammar is None:
        return dataclasses.replace(defaults, **settings)
    try:
        return dataclasses.replace(defaults, **settings, structured_outputs=answer.grammar.structured_outputs)
    except RequestError as error:
        raise answer.grammar.own(error) from None


def _thinking_budget(model: ServedModel, settings: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the thinking budget of a request (None: no budget) and how many tokens it may be exceeded by."""
    asked, ceiling = settings.get("thinking_token_budget"), model.reasoning_budget
    budget = None if asked == -1 else asked
    if model.parsers.reasoning is None or ceiling is None:
        return {"thinking_token_budget": budget}  # refused where the grammar is made
    budget = ceiling if budget is None else min(budget, ceiling)
    grace = settings.get("thinking_budget_grace_period", model.default_sampling_params.thinking_budget_grace_period)
    return {"thinking_token_budget": budget, "thinking_budget_grace_period": min(grace, ceiling - budget)}


def _check_stops(stop: str | Sequence[str]) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise RequestError(f"holds {len(stops)} strings: send at most {MAX_STOPS}", param="stop")
    if any(not text for text in stops):
        raise RequestError("holds an empty string: leave it out", param="stop")
    if any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise RequestError(f"holds a string of more than {MAX_STOP_CHARACTERS} characters: shorten it", param="stop")
