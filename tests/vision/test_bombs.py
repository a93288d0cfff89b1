"""Files that cost more than they are long, or lie about what they hold: what it takes to read or to refuse them."""

import pytest

from tests.vision.image_bombs import bombs, largest, read, read_alone

REFUSALS = ("make it smaller", "is not an image that can be read", "is broken or truncated", "is not valid base64")


def test_bombs_are_refused_before_they_cost_anything():
    read(bytes(8))  # which starts a process
    for name, (data, is_read) in bombs().items():
        outcome, _, processor_seconds = read(data)
        assert any(each in outcome for each in REFUSALS) != is_read, (name, outcome)
        assert "\n" not in outcome
        # A process that decodes is counted in hundredths.
        assert is_read or processor_seconds < 0.12, (name, processor_seconds)


@pytest.mark.slow
def test_bombs_take_no_memory():
    for name, (data, is_read) in bombs(60_000).items():
        *_, mib, decoder_mib = read_alone(data)
        # A file is there while it is read; and of what is read, or found out late, the pixels that its header claims.
        most = 8 + (2 * len(data) >> 20) + (300 if is_read or "6,000" in name else 0)
        assert mib < most, name
        assert decoder_mib < most, name


@pytest.mark.slow
def test_the_largest_images_take_little_more_than_their_pixels():
    for name, (data, _) in largest().items():
        outcome, _, _, mib, decoder_mib = read_alone(data)
        assert outcome == "6300 x 6300", name
        assert mib < 2 * 4 * 6300 * 6300 >> 20, name
        assert decoder_mib < 5 * 4 * 6300 * 6300 >> 20, name
