"""Objects that stay count as old: collections of young objects do not look at them."""

import gc
import weakref

import pytest

from jaxis.host.garbage import nothing_collected

OLDEST = 2


class Cyclic:
    def __init__(self):
        self.itself = self


def is_old(value):
    return any(each is value for each in gc.get_objects(generation=OLDEST))


@pytest.fixture
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_of_the_block_are_old_and_are_collected_with_those():
    with nothing_collected():
        assert not gc.isenabled()
        kept = Cyclic()
        gone = weakref.ref(Cyclic())
    assert gc.isenabled()
    assert is_old(kept)
    gc.collect(OLDEST - 1)
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_an_inner_block_and_a_failure_leave_the_collector_as_it_was():
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="it"), nothing_collected():
        raise ValueError("it")
    assert gc.isenabled()


def test_what_a_program_froze_stays_frozen():
    gc.freeze()
    with nothing_collected():
        pass
    assert gc.get_freeze_count() > 0
