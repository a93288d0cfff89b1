"""What a streamed request is told after each step: its new tokens, and the text of those that can no longer change."""

from __future__ import annotations

from jaxis import LLM, SamplingParams
from jaxis.engine.delta_tracker import DeltaTracker


def test_text_comes_with_the_steps_that_made_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = [5, 60, 7]
    [whole] = llm.generate([{"prompt_token_ids": prompt}], params)
    request = llm.engine.add_request("streamed", prompt, params)
    tracker = DeltaTracker(request)
    text, token_ids, told = "", [], []
    while not request.finished:
        llm.engine.step()
        delta = tracker.take_tokens()
        if delta is None:
            output = tracker.take()
            delta = "".join(c.text for c in output.outputs), [t for c in output.outputs for t in c.token_ids]
        text, token_ids = text + delta[0], token_ids + delta[1]
        told.append((len(token_ids), text))
    assert (text, token_ids) == (whole.outputs[0].text, whole.outputs[0].token_ids)
    # Text is held back only while a token may still change it, which is a few tokens at most.
    for num_tokens, so_far in told:
        assert len(so_far) >= len(llm.tokenizer.decode(token_ids[: max(num_tokens - 4, 0)])) - 1
