import time

import pytest

from jaxis.host.progress import ProgressDisplay


@pytest.fixture
def terminal(monkeypatch):
    """stderr counts as a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


def show_everything(display):
    display.note("a note: jaxis[vision] [/] :smile:")
    with display.loading("a [/] model") as update:
        update(1_000_000, 4_000_000)
        with display.compiling("the sampler"):
            time.sleep(0.25)  # the bar is redrawn ten times a second
            update(2_000_000, 4_000_000)
    with display.generating(3) as update:
        update(1, 10)
    with display.compiling("a step of 8 tokens"):
        pass


def test_on_a_terminal(terminal, capsys):
    show_everything(ProgressDisplay())
    captured = capsys.readouterr()
    for shown in (
        "a note: jaxis[vision] [/] :smile:",
        "Loading a [/] model",
        "/4.0 MB",
        "Compiling the sampler",
        "Generating",
        "1/3",
        "tokens/s",
    ):
        assert shown in captured.err
    assert "Compiling a step of 8 tokens" in captured.err
    assert captured.out == ""


def test_a_total_that_is_not_known_is_not_shown(terminal, capsys):
    display = ProgressDisplay()
    for bar in (display.loading("a model"), display.working("packing"), display.counting("steps")):
        with bar:
            time.sleep(0.15)
    shown = capsys.readouterr().err
    assert "Loading a model" in shown
    assert "?" not in shown.replace("\x1b[?25", "")  # without the codes that hide and show the cursor


def test_elsewhere_only_notes_are_shown(capsys):
    show_everything(ProgressDisplay())
    captured = capsys.readouterr()
    assert captured.err == "a note: jaxis[vision] [/] :smile:\n"
    assert captured.out == ""


def test_disabled(terminal, capsys):
    show_everything(ProgressDisplay(enabled=False))
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_a_bar_that_ends_in_an_error_leaves_the_next_one_working(terminal, capsys):
    display = ProgressDisplay()
    with pytest.raises(ZeroDivisionError), display.generating(2):
        raise ZeroDivisionError
    with display.compiling("the sampler"):
        pass
    assert "Compiling the sampler" in capsys.readouterr().err
