"""Lookup and suffix drafters against searches by brute force; what a prediction adds; what salts keep apart."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.drafting.speculation import DraftRequest
from jaxis.engine.drafting.suffix import SuffixDrafter, TextIndex
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.sampling_params import SamplingParams


def sequence(prompt: list[int], output: list[int] = (), *, name: str = "a", prediction: list[int] = (), salt=None):
    return Sequence(
        SequenceId(name),
        list(prompt),
        SamplingParams(),
        frozenset(),
        len(prompt) + 1000,
        arrival=0,
        cache_salt=salt,
        prediction_token_ids=list(prediction),
        output_token_ids=list(output),
    )


def draft(drafter, sequence, limit=8):
    [found] = drafter.propose([DraftRequest(sequence, limit)])
    return list(found)


def by_brute_force(text: list[int], least: int, most: int, limit: int) -> list[int]:
    """The continuation of the latest of the longest earlier occurrences of the text's end."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        for stop in range(len(text) - 1, length - 1, -1):
            if text[stop - length : stop] == text[-length:]:
                return gone_on(text, stop, limit)
    return []


def gone_on(text: list[int], start: int, limit: int) -> list[int]:
    """What follows tokens that go on as they did from a place."""
    going_on = list(text)
    while len(going_on) < len(text) + limit:
        going_on.append(going_on[start + len(going_on) - len(text)])
    return going_on[len(text) :]


def returned(texts: list[list[int]], least: int, most: int) -> int | None:
    """Where the last of these texts, each of which is the one before and more, goes on after an edit, if it does."""
    text, copied_from, copied_to = texts[-1], None, 0
    for known in texts[:-1]:
        stops = [
            (length, stop)
            for length in range(least, min(most, len(known) - 1) + 1)
            for stop in range(length, len(known))
            if known[stop - length : stop] == known[-length:]
        ]
        if stops:
            copied_from, copied_to = max(stops)[1], len(known)
    if copied_from is None:
        return None
    while copied_to < len(text) and text[copied_from] == text[copied_to]:
        copied_from, copied_to = copied_from + 1, copied_to + 1
    num_edited = len(text) - copied_to
    for length in range(least - 1, 0, -1):
        stops = [stop for stop in range(length, len(text)) if text[stop - length : stop] == text[-length:]]
        if stops:
            nearest = min(stops, key=lambda stop: abs(stop - copied_from - num_edited))
            return nearest if num_edited <= 16 and abs(nearest - copied_from - num_edited) <= 8 else None
    return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("alphabet", [2, 5, 40])
def test_lookup_finds_the_latest_of_the_longest_matches(alphabet: int) -> None:
    rng = random.Random(alphabet)
    found_any = num_returns = 0
    for _ in range(150):
        least = rng.randint(1, 4)
        most = rng.randint(least, 9)
        text = [rng.randrange(alphabet) for _ in range(rng.randint(1, 60))]
        num_prompt = rng.randint(1, len(text))
        drafter = LookupDrafter(least, most)
        growing, asked = sequence(text[:num_prompt]), []
        for token in [*text[num_prompt:], None]:
            known = growing.prompt_token_ids + growing.output_token_ids
            if rng.random() < 0.8:
                limit = rng.randint(1, 9)
                asked.append(known)
                expected = by_brute_force(known, least, most, limit)
                if not expected and (start := returned(asked, least, most)) is not None:
                    expected = gone_on(known, start, limit)
                    num_returns += 1
                assert draft(drafter, growing, limit) == expected
                found_any += bool(expected)
            if token is not None:
                growing.output_token_ids.append(token)
    assert found_any > 50
    assert num_returns > 10


def test_where_rules_agree_lookup_drafts_what_transformers_does() -> None:
    """transformers takes the first match; texts in which the longest end occurred once before have no other."""
    rng = random.Random(1)
    for _ in range(30):
        part = rng.sample(range(1000), 12)
        text = [*range(2000, 2010), *part, *range(3000, 3010), *part[:4]]
        theirs = PromptLookupCandidateGenerator(num_output_tokens=6, max_matching_ngram_size=4, max_length=200)
        candidates, _ = theirs.get_candidates(torch.tensor([text]))
        assert draft(LookupDrafter(3, 4), sequence(text), 6) == candidates[0, len(text) :].tolist()


def test_a_prediction_is_the_draft_from_the_first_token_on_and_where_the_output_returns_to_it() -> None:
    prediction = list(range(100, 140))
    drafter = LookupDrafter(3, 8)
    edited = sequence([1, 2, 3, 4, 5], prediction=prediction)
    assert draft(drafter, edited, 6) == prediction[:6]
    edited.output_token_ids += prediction[:4]
    assert draft(drafter, edited, 6) == prediction[4:10]
    drafter.observe(edited, 6, 4)
    assert (edited.num_accepted_predictions, edited.num_rejected_predictions) == (4, 2)
    edited.output_token_ids += [7, 7, *prediction[20:23]]
    assert draft(drafter, edited, 6) == prediction[23:29]
    edited.output_token_ids += [*prediction[23:30], 8, prediction[31]]
    assert draft(drafter, edited, 6) == prediction[32:38], "another token, and one that is where the copy would be"
    edited.output_token_ids += prediction[32:]
    assert draft(drafter, edited, 6) == [], "nothing follows the prediction's end"


def test_the_index_counts_what_follows_the_longest_run() -> None:
    rng = random.Random(3)
    for _ in range(100):
        texts = [[rng.randrange(4) for _ in range(rng.randint(2, 30))] for _ in range(4)]
        index = TextIndex()
        for text in texts:
            index.add(text)
        end = [rng.randrange(4) for _ in range(6)]
        runs = {}
        for length in range(2, 7):
            runs[length] = Counter(
                tuple(text[at + length : at + length + 1])
                for text in texts
                for at in range(len(text) - length + 1)
                if text[at : at + length] == end[-length:]
            )
        # The end of the tokens counts as a place where nothing follows.
        longest = max((length for length, following in runs.items() if following), default=0)
        score, guess = index.continuation(end, 1, max_match=6, spec_factor=1.0, min_prob=0.0)
        if longest == 0 or (runs[longest].most_common(1)[0][0] == () and len(runs[longest]) == 1):
            assert guess == []
            continue
        most = max(runs[longest].values())
        if guess:
            assert runs[longest][guess[0],] == most
            assert score == pytest.approx(most / runs[longest].total())
        else:
            assert runs[longest][()] == most


def test_suffix_drafts_come_from_finished_outputs_of_the_same_salt_only() -> None:
    drafter = SuffixDrafter(24, 10, 4.0, 0.1)
    secret = list(range(500, 520))
    drafter.forget(sequence([1, 2], secret, name="done", salt="tenant"))
    prompt = [9, 8, *secret[:4]]
    assert draft(drafter, sequence(prompt, name="same", salt="tenant"), 6) == secret[4:10]
    for salt in (None, "", "other"):
        assert draft(drafter, sequence(prompt, name=f"salt {salt}", salt=salt), 6) == []


def test_only_so_many_finished_outputs_are_kept() -> None:
    drafter = SuffixDrafter(24, 3, 4.0, 0.1)
    outputs = [list(range(100 * i, 100 * i + 10)) for i in range(1, 8)]
    for i, output in enumerate(outputs):
        drafter.forget(sequence([1], output, name=str(i)))
    known = [
        draft(drafter, sequence([1, 2, *output[:3]], name=f"new {output[0]}"), 2) == output[3:5] for output in outputs
    ]
    assert sum(known) <= 3
    assert known[-1]
