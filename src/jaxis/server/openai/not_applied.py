"""Rules for fields that OpenAI, vLLM and other servers have, and this server does not apply."""

from __future__ import annotations

from jaxis.server.http.body import NotApplied

# Fields for OpenAI's accounts, records and caches.
ACCOUNT_FIELDS: dict[str, NotApplied] = {
    "user": NotApplied(),
    "metadata": NotApplied(neutral=({},)),
    "safety_identifier": NotApplied(),
    "prompt_cache_key": NotApplied(),
    "prompt_cache_retention": NotApplied(),
    "verbosity": NotApplied(),
    "service_tier": NotApplied(neutral=("auto", "default")),
    "store": NotApplied(neutral=(False,)),
}

_NO_BEAM_SEARCH = "there is no beam search here: leave it out"
_NOT_SUPPORTED = "it is not supported here: leave it out"
_NO_ADAPTERS = "adapters are not supported here: leave it out"
_THINKING = "send reasoning_effort, or the template's own variable in chat_template_kwargs"
_MAX_TOKENS = "send max_tokens"
OTHER_THINKING_BUDGET = NotApplied((-1,), "send thinking_token_budget")
# Fields of vLLM, llama.cpp, SGLang and others.
OTHER_SERVERS_FIELDS: dict[str, NotApplied] = {
    # Sampling.
    "use_beam_search": NotApplied((False,), _NO_BEAM_SEARCH),
    "length_penalty": NotApplied((1.0,), _NO_BEAM_SEARCH),
    "early_stopping": NotApplied((False,), _NO_BEAM_SEARCH),
    "repeat_penalty": NotApplied((1.0,), "send repetition_penalty"),
    "typical_p": NotApplied((1.0,), _NOT_SUPPORTED),
    "tfs_z": NotApplied((1.0,), _NOT_SUPPORTED),
    "top_a": NotApplied((0,), _NOT_SUPPORTED),
    "top_n_sigma": NotApplied((0, -1), _NOT_SUPPORTED),
    "mirostat": NotApplied((0,), _NOT_SUPPORTED),
    "mirostat_mode": NotApplied((0,), _NOT_SUPPORTED),
    "dynatemp_range": NotApplied((0,), _NOT_SUPPORTED),
    "dry_multiplier": NotApplied((0,), _NOT_SUPPORTED),
    "xtc_probability": NotApplied((0,), _NOT_SUPPORTED),
    "samplers": NotApplied(([],), _NOT_SUPPORTED),
    "logits_processors": NotApplied(([],), "code from requests is never run: leave it out"),
    "vllm_xargs": NotApplied(({},), _NOT_SUPPORTED),
    # Length.
    "n_predict": NotApplied((-1,), _MAX_TOKENS),
    "num_predict": NotApplied((-1,), _MAX_TOKENS),
    "max_new_tokens": NotApplied((), _MAX_TOKENS),
    "max_output_tokens": NotApplied((), _MAX_TOKENS),
    "truncate_prompt_tokens": NotApplied((), "prompts are never cut: shorten it yourself"),
    # Prompts and weights.
    "chat_template": NotApplied((), "only the server's own template is used: leave it out"),
    "documents": NotApplied(([],), "put them into a message"),
    "prompt_embeds": NotApplied((), "prompts are text or token ids"),
    "mm_processor_kwargs": NotApplied(({},), _NOT_SUPPORTED),
    "lora_path": NotApplied((), _NO_ADAPTERS),
    "lora_request": NotApplied((), _NO_ADAPTERS),
    # Reasoning.
    "enable_thinking": NotApplied((), _THINKING),
    "thinking": NotApplied((), _THINKING),
    "think": NotApplied((), _THINKING),
    "reasoning": NotApplied(({},), _THINKING),
    "thinking_budget_tokens": OTHER_THINKING_BUDGET,
    "thinking_budget": OTHER_THINKING_BUDGET,
    "reasoning_budget_tokens": OTHER_THINKING_BUDGET,
    "reasoning_budget": OTHER_THINKING_BUDGET,
    # The answer's grammar.
    "regex": NotApplied((), "send structured_outputs.regex"),
    "ebnf": NotApplied((), "send structured_outputs.grammar"),
    "grammar": NotApplied(("",), "send structured_outputs.grammar"),
    "json_schema": NotApplied(({},), "send response_format"),
    "guided_whitespace_pattern": NotApplied((), _NOT_SUPPORTED),
    "spaces_between_special_tokens": NotApplied((True,), _NOT_SUPPORTED),
    "n_probs": NotApplied((0,), "send logprobs"),
    "audio": NotApplied((), "answers are text: leave it out"),
    # Tools.
    "functions": NotApplied(([],), "send tools"),
    "function_call": NotApplied(("none", "auto"), "send tool_choice"),
    "web_search_options": NotApplied((), "nothing is ever fetched: leave it out"),
}
# Fields of one endpoint, sent to another.
_MESSAGES = "send messages"
_TO_CHAT = "call /v1/chat/completions"
_TEXT_FORMAT = "send text.format"
NOT_FOR_CHAT: dict[str, NotApplied] = {
    "prompt": NotApplied((), _MESSAGES),
    "input": NotApplied((), _MESSAGES),
    "instructions": NotApplied(("",), _MESSAGES),
    "text": NotApplied(({},), "send response_format"),
    "add_special_tokens": NotApplied((False,), "the template writes its own special tokens: leave it out"),
    "best_of": NotApplied((1,), "send n, and choose"),
}
NOT_FOR_COMPLETIONS: dict[str, NotApplied] = {
    "messages": NotApplied((), _TO_CHAT),
    "input": NotApplied((), "send prompt"),
    "instructions": NotApplied(("",), _TO_CHAT),
    "tools": NotApplied(([],), _TO_CHAT),
    "tool_choice": NotApplied(("none", "auto"), _TO_CHAT),
    "chat_template_kwargs": NotApplied(({},), _TO_CHAT),
    "continue_final_message": NotApplied((False,), _TO_CHAT),
    "reasoning_effort": NotApplied((), _TO_CHAT),
    "top_logprobs": NotApplied((), "send logprobs"),
}
NOT_FOR_RESPONSES: dict[str, NotApplied] = {
    "messages": NotApplied((), "send input"),
    "max_tokens": NotApplied((), "send max_output_tokens"),
    "max_completion_tokens": NotApplied((), "send max_output_tokens"),
    "reasoning_effort": NotApplied((), "send reasoning.effort"),
    "logprobs": NotApplied((False,), 'send include=["message.output_text.logprobs"]'),
    "response_format": NotApplied((), _TEXT_FORMAT),
    "structured_outputs": NotApplied((), _TEXT_FORMAT),
    "guided_json": NotApplied((), _TEXT_FORMAT),
    "guided_regex": NotApplied((), _TEXT_FORMAT),
    "guided_choice": NotApplied((), _TEXT_FORMAT),
    "guided_grammar": NotApplied((), _TEXT_FORMAT),
}
