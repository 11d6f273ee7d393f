"""Sampling ahead: which batch may be begun when, and what waits for what. Every wait is for an event, none for the clock."""

from __future__ import annotations

import threading

import pytest

from arpo_algo.pipeline import Pipeline

PATIENCE = 60.0


class Maker:
    """Makes a batch when it is allowed to; notes the newest weights that were in place when it began."""

    def __init__(self) -> None:
        self.weights = 0
        self.begun: dict[int, int] = {}
        self.started = {step: threading.Event() for step in range(10)}
        self.allowed = {step: threading.Event() for step in range(10)}

    def __call__(self, step: int) -> int:
        self.begun[step] = self.weights
        self.started[step].set()
        assert self.allowed[step].wait(PATIENCE)
        return step

    def allow_all(self) -> None:
        for event in self.allowed.values():
            event.set()


def publish(pipeline: Pipeline[int], maker: Maker) -> None:
    def newer() -> None:
        maker.weights += 1

    pipeline.publish(newer)


def test_nothing_ahead_is_made_by_the_caller_with_the_newest_weights() -> None:
    maker, threads = Maker(), threading.active_count()
    maker.allow_all()
    pipeline = Pipeline(maker, first=0, last=3, ahead=0)
    for step in range(3):
        assert pipeline.get() == step
        publish(pipeline, maker)
    assert maker.begun == {0: 0, 1: 1, 2: 2} and threading.active_count() == threads
    pipeline.close()


def test_one_ahead_is_sampled_by_the_weights_of_the_step_before() -> None:
    maker = Maker()
    maker.allow_all()
    pipeline = Pipeline(maker, first=0, last=6, ahead=1)
    for step in range(6):
        assert pipeline.get() == step
        if step < 5:
            assert maker.started[step + 1].wait(PATIENCE), "the next batch is made while this one is trained on"
        assert not maker.started[min(step + 2, 9)].is_set(), "two ahead would be too old"
        publish(pipeline, maker)
    pipeline.close()
    assert maker.begun == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}


def test_weights_never_overtake_the_batch_that_the_old_ones_are_to_sample() -> None:
    """A learner that is done before the sampler's thread has run at all."""
    maker, wake = Maker(), threading.Event()
    maker.allow_all()

    class Slow(Pipeline[int]):
        def _begin(self) -> int | None:
            if self._next == 1:
                assert wake.wait(PATIENCE)
            return super()._begin()

    pipeline = Slow(maker, first=0, last=3, ahead=1)
    assert pipeline.get() == 0
    learner = threading.Thread(target=publish, args=(pipeline, maker), daemon=True)
    learner.start()
    wake.set()
    learner.join(PATIENCE)
    assert not learner.is_alive() and maker.begun[1] == 0
    assert [pipeline.get(), pipeline.get()] == [1, 2]
    pipeline.close()


def test_in_flight_weights_wait_for_nothing() -> None:
    maker = Maker()
    maker.allowed[0].set()
    pipeline = Pipeline(maker, first=0, last=2, ahead=1)
    assert pipeline.get() == 0 and maker.started[1].wait(PATIENCE)
    pipeline.publish(lambda: setattr(maker, "weights", 1), in_flight=True)
    assert maker.weights == 1
    maker.allow_all()
    assert pipeline.get() == 1
    pipeline.close()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_batch_is_older_than_allowed(ahead: int) -> None:
    maker = Maker()
    maker.allow_all()
    pipeline = Pipeline(maker, first=0, last=9, ahead=ahead)
    for _ in range(9):
        pipeline.get()
        publish(pipeline, maker)
    pipeline.close()
    assert sorted(maker.begun) == list(range(9))
    assert all(0 <= step - weights <= ahead for step, weights in maker.begun.items())


def test_new_weights_wait_for_the_batch_under_way_and_go_before_the_next() -> None:
    maker, done = Maker(), threading.Event()
    maker.allowed[0].set()
    pipeline = Pipeline(maker, first=0, last=4, ahead=2)
    assert pipeline.get() == 0
    assert maker.started[1].wait(PATIENCE)

    def learner() -> None:
        publish(pipeline, maker)
        done.set()

    threading.Thread(target=learner, daemon=True).start()
    while not pipeline._held:
        pass
    assert not done.is_set() and maker.weights == 0
    maker.allowed[1].set()
    assert done.wait(PATIENCE)
    maker.allow_all()
    assert [pipeline.get() for _ in range(3)] == [1, 2, 3]
    pipeline.close()
    assert maker.begun[1] == 0 and maker.begun[2] == 1


def test_what_sampling_raises_reaches_the_learner_after_the_batches_before_it() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise KeyError("the tool is gone")
        return step

    pipeline = Pipeline(make, first=0, last=4, ahead=1)
    assert pipeline.get() == 0
    with pytest.raises(KeyError, match="the tool is gone"):
        pipeline.get()
    pipeline.close()


def test_closing_drops_what_was_made_ahead_and_begins_nothing_more() -> None:
    maker = Maker()
    maker.allow_all()
    pipeline = Pipeline(maker, first=0, last=9, ahead=3)
    pipeline.get()
    pipeline.close()
    made = len(maker.begun)
    pipeline.publish(lambda: None)
    assert len(maker.begun) == made <= 4
    assert "arpo-sampling" not in {thread.name for thread in threading.enumerate()}
