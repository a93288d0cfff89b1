import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.tokenizer import IncrementalDetokenizer, Tokenizer, TokenPlaces
from tests.support.tokenizer_families import BYTE_LEVEL_FAMILIES, FAMILIES, TEXTS

# Text in which multi-byte characters, joined emoji, combining marks and white space are frequent.
PIECES = [
    "a",
    "b",
    "ab",
    " ",
    "  ",
    "\n",
    "é",
    "e\u0301",
    "ß",
    "東京",
    "😀",
    "👩‍👩‍👧",
    "🇫🇷",
    "the cat",
    ".",
    "x",
    "\t",
    "1",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
stops = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), max_size=4)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def stream(detokenizer, token_ids):
    """Feeds one token at a time; returns the deltas, and checks that what was shown never changes."""
    deltas = []
    for token_id in token_ids:
        hit = detokenizer.update([token_id])
        deltas.append(detokenizer.delta())
        assert detokenizer.text == "".join(deltas)
        if hit is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.delta())
    assert detokenizer.text == "".join(deltas)
    return deltas


def cut_at_first_stop(text, stop, include):
    """The definition: the stop string that is complete first, of those the one that began first."""
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        return text, None
    end, start, hit = min(ends)
    return text[: end if include else start], hit


def continuation(theirs, prompt_ids, output_ids, skip_special_tokens=True):
    before = theirs.decode(prompt_ids, skip_special_tokens=skip_special_tokens)
    whole = theirs.decode(prompt_ids + output_ids, skip_special_tokens=skip_special_tokens)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=120, deadline=None)
@given(prompt=texts, output=texts, stop=stops, include=st.booleans())
def test_streamed_text_equals_batch_decoding_cut_at_the_stop_string(load_pair, family, prompt, output, stop, include):
    ours, theirs = load_pair(family)
    prompt_ids, output_ids = ours.encode(prompt), encode(ours, output)
    expected, hit = cut_at_first_stop(continuation(theirs, prompt_ids, output_ids), stop, include)
    detokenizer = IncrementalDetokenizer(
        ours, prompt_ids, stop=stop, include_stop_str_in_output=include, skip_special_tokens=True
    )
    stream(detokenizer, output_ids)
    assert detokenizer.text == expected
    assert detokenizer.stop_hit == hit


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(output=texts, stop=stops, data=st.data())
def test_result_does_not_depend_on_how_many_tokens_come_at_once(load_pair, family, output, stop, data):
    ours, _ = load_pair(family)
    token_ids = encode(ours, output)
    one_by_one = IncrementalDetokenizer(ours, [], stop=stop)
    stream(one_by_one, token_ids)
    chunked = IncrementalDetokenizer(ours, [], stop=stop)
    while token_ids:
        size = data.draw(st.integers(1, len(token_ids)))
        chunked.update(token_ids[:size])
        token_ids = token_ids[size:]
    chunked.finish()
    assert (chunked.text, chunked.stop_hit) == (one_by_one.text, one_by_one.stop_hit)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", BYTE_LEVEL_FAMILIES)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tokens_of_byte_level_families_equal_batch_decoding(load_pair, family, skip_special_tokens, data):
    ours, theirs = load_pair(family)
    # The first 256 tokens are single bytes, many of them parts of characters; the last ids are of no token.
    token_ids = data.draw(st.lists(st.integers(0, 260) | st.integers(0, len(theirs) + 5), max_size=20))
    detokenizer = IncrementalDetokenizer(ours, [], skip_special_tokens=skip_special_tokens)
    stream(detokenizer, token_ids)
    assert detokenizer.text == theirs.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_partial_character_is_ever_shown(load_pair, family):
    ours, _ = load_pair(family)
    for text in TEXTS:
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(stream(IncrementalDetokenizer(ours, []), encode(ours, text)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_character_cut_off_at_the_end_becomes_what_batch_decoding_makes_of_it(load_pair, family):
    ours, theirs = load_pair(family)
    token_ids = encode(ours, "a🦑")[:-1]
    detokenizer = IncrementalDetokenizer(ours, [])
    detokenizer.update(token_ids)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == theirs.decode(token_ids)
    assert detokenizer.text.startswith("a\ufffd")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_character_begun_in_the_prompt_is_completed(load_pair, family):
    ours, _ = load_pair(family)
    token_ids = ours.encode("seven squids: 🦑!")
    prompt_end = next(i for i, t in enumerate(token_ids) if ours.token_bytes(t)[:1] == "🦑".encode()[:1]) + 1
    detokenizer = IncrementalDetokenizer(ours, token_ids[:prompt_end])
    stream(detokenizer, token_ids[prompt_end:])
    assert detokenizer.text == "🦑!"


def test_the_leading_space_is_kept_after_a_prompt_only(load_pair):
    ours, _ = load_pair("llama2")
    cat = ours.token_to_id("▁cat")
    for prompt_ids, expected in ([], "cat"), ([ours.bos_token_id], "cat"), (ours.encode("the"), " cat"):
        detokenizer = IncrementalDetokenizer(ours, prompt_ids)
        detokenizer.update([cat])
        assert detokenizer.text == expected


def test_special_tokens_are_skipped_or_shown(load_pair):
    ours, _ = load_pair("llama2")
    token_ids = [*encode(ours, "the"), ours.eos_token_id, ours.eos_token_id, ours.token_to_id("▁cat")]
    for skip, expected in (True, "the cat"), (False, "the</s></s> cat"):
        detokenizer = IncrementalDetokenizer(ours, [], skip_special_tokens=skip)
        stream(detokenizer, token_ids)
        assert detokenizer.text == expected


def test_what_may_become_a_stop_string_is_held_back(load_pair):
    ours, _ = load_pair("qwen3")
    detokenizer = IncrementalDetokenizer(ours, [], stop=["###END", "##!"])
    seen = []
    for character in "ab###EN###E##!x":
        detokenizer.update(encode(ours, character))
        seen.append(detokenizer.delta())
    assert seen == ["a", "b", "", "", "", "", "", "###EN", "", "", "", "###E", "", "", ""]
    assert detokenizer.stop_hit == "##!"


def test_a_held_back_tail_is_released_at_the_end(load_pair):
    ours, _ = load_pair("qwen3")
    detokenizer = IncrementalDetokenizer(ours, [], stop=["cats"])
    detokenizer.update(encode(ours, "the cat"))
    assert detokenizer.delta() == "the "
    detokenizer.finish()
    assert detokenizer.delta() == "cat"
    assert detokenizer.text == "the cat"


@pytest.mark.parametrize(("include", "expected"), [(False, "one"), (True, "one STOP")])
def test_a_stop_string_inside_a_token_ends_the_text_there(load_pair, include, expected):
    ours, _ = load_pair("qwen3")
    detokenizer = IncrementalDetokenizer(ours, [], stop=["never", " STOP"], include_stop_str_in_output=include)
    assert detokenizer.update(encode(ours, "one STOP and more")) == " STOP"
    assert detokenizer.update(encode(ours, "ignored")) == " STOP"
    detokenizer.finish()
    assert detokenizer.text == detokenizer.delta() == expected


def test_stop_strings_in_the_prompt_do_not_count(load_pair):
    ours, _ = load_pair("qwen3")
    detokenizer = IncrementalDetokenizer(ours, encode(ours, "STOP ST"), stop=["STOP"])
    assert detokenizer.update(encode(ours, "OP")) is None


def test_tokens_that_end_one_character_and_begin_the_next_stream_at_once():
    letters = {0xD0: "Ð", 0xAF: "¯", 0x41: "A"}  # bytes as byte-level BPE writes them
    vocab = {"Ð": 0, "¯": 1, "¯Ð": 2, "A": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("¯", "Ð")]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    assert set("".join(vocab)) == set(letters.values())
    detokenizer = IncrementalDetokenizer(Tokenizer(backend), [])
    assert stream(detokenizer, [0, 2, 2, 1, 3]) == ["", "Я", "Я", "Я", "A", ""]


def test_an_invalid_byte_spoils_no_character_before_it(load_pair):
    ours, _ = load_pair("llama2")
    token_ids = [ours.token_to_id(f"<0x{byte:02X}>") for byte in [*"€".encode(), 0xFF, *"€".encode()]]
    detokenizer = IncrementalDetokenizer(ours, [])
    stream(detokenizer, token_ids)
    assert detokenizer.text == "€\ufffd€"


def test_tokens_are_looked_up_and_not_decoded_again(load_pair, monkeypatch):
    ours, _ = load_pair("qwen3")
    calls = []
    find = ours._find_token_bytes
    monkeypatch.setattr(ours, "_find_token_bytes", lambda token_id: calls.append(token_id) or find(token_id))
    monkeypatch.setattr(ours, "_bytes_of_token", {})
    token_ids = encode(ours, "the cat 😀 " * 20) + [ours.vocab_size + 3] * 100
    detokenizer = IncrementalDetokenizer(ours, encode(ours, "a long prompt " * 50), stop=["nothing"])
    for token_id in token_ids:
        detokenizer.update([token_id])
    assert len(calls) <= len(set(token_ids)) + 4


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=120, deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", " ", " the cat", "é", "e\u0301", "東京", "😀"])).map("".join),
    cut=st.integers(0, 60),
)
def test_a_token_begins_where_the_text_before_it_ends(load_pair, family, text, cut):
    """Also behind a prompt, which may end inside a character."""
    ours, theirs = load_pair(family)
    ids = encode(ours, text)
    prefixes = [theirs.decode(ids[:i], skip_special_tokens=False) for i in range(len(ids) + 1)]
    places, before = TokenPlaces(ours, skip_special_tokens=False).add(ids[:cut])
    rest = TokenPlaces(ours, ids[:cut], skip_special_tokens=False, start=len(before))
    more_places, after = rest.add(ids[cut:])
    assert before + after == prefixes[-1]
    # transformers turns all of a run of byte tokens into U+FFFD where the last is a part of a character.
    whole = [len(prefix.rstrip("\ufffd")) for prefix in prefixes[:-1]]
    assert places + more_places == [max(whole[: i + 1]) for i in range(len(ids))]
