"""The arithmetic of the models behind docs/scaling.md: virtual clock, schedules, scale, sizing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from benchmark_modules import load

from arpo_algo.branching import EntropyBranching, NoBranching

schedules, scale_sim, sizing = load("schedules"), load("scale_sim"), load("sizing")
virtual_clock = schedules.virtual_clock


@pytest.fixture
def script() -> Iterator[Any]:
    return schedules.Script(tool=schedules.LogNormal(median=0.2, sigma=1.0), token_seconds=0.01)


# -- the clock -----------------------------------------------------------------------------------------------------------------------------------------


def test_the_clock_jumps_over_waiting_in_the_loop_and_in_threads() -> None:
    clock = virtual_clock.VirtualClock("sleeper")
    events: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def in_loop() -> None:
            await asyncio.sleep(1000.0)
            events.append(("loop", loop.time()))

        def in_thread(seconds: float, done: asyncio.Future[None]) -> None:
            clock.sleep(seconds)
            events.append(("thread", clock.now))
            loop.call_soon_threadsafe(done.set_result, None)

        futures = [loop.create_future() for _ in range(3)]
        for seconds, future in zip((500.0, 1500.0, 10.0), futures, strict=True):
            threading.Thread(target=in_thread, args=(seconds, future), name="sleeper", daemon=True).start()
        await asyncio.gather(in_loop(), *futures)

    virtual_clock.run(main(), clock)
    assert events == [("thread", 10.0), ("thread", 500.0), ("loop", 1000.0), ("thread", 1500.0)]
    assert clock.now == 1500.0


def test_the_thread_of_the_loop_cannot_sleep_on_its_own_clock() -> None:
    clock = virtual_clock.VirtualClock("sleeper")

    async def main() -> None:
        clock.sleep(1.0)

    with pytest.raises(RuntimeError, match="only threads named 'sleeper'"):
        virtual_clock.run(main(), clock)


# -- schedules -----------------------------------------------------------------------------------------------------------------------------------------


def test_makespan_and_barrier_by_hand() -> None:
    # Two workers take 3, 1, 2, 4 in this order: one has 3 and then 4, the other 1 and 2, so that it ends at 7.
    assert schedules.makespan([3.0, 1.0, 2.0, 4.0], 2) == 7.0
    assert schedules.makespan([3.0, 1.0, 2.0, 4.0], 1) == 10.0
    assert schedules.makespan([], 4) == 0.0
    # Round 1: the slowest turn 2, then tools 1 and 5 side by side; round 2: one turn of 1, an answer.
    rounds = [[(2.0, 1.0), (1.0, 5.0), (0.5, 0.0)], [(1.0, 0.0)]]
    assert schedules.barrier(rounds, 64) == 2 + 5 + 1
    assert schedules.barrier(rounds, 1) == 2 + 6 + 1


def test_without_branching_nothing_is_waited_for(script: Any) -> None:
    seconds, trees = schedules.asynchronous(script, 3, NoBranching(), trees=2)
    assert seconds == pytest.approx(schedules.longest_path(trees), rel=1e-9)
    rounds = schedules.rounds_of(trees)
    assert len(rounds[0]) == 2 * schedules.GROUP
    assert schedules.barrier(rounds, 1) > schedules.barrier(rounds, 64) > seconds


def test_latencies_and_threads_do_not_change_the_tree(script: Any) -> None:
    roomy, trees = schedules.asynchronous(script, 5, EntropyBranching(), trees=2)
    tight, same = schedules.asynchronous(script, 5, EntropyBranching(), schedules.settings(env_workers=2, max_live=16), trees=2)
    assert [tree.canonical() for tree in trees] == [tree.canonical() for tree in same]
    assert schedules.longest_path(trees) <= roomy < tight
    assert {t.origin for tree in trees for t in tree.trajectories} >= {"initial", "branched"}
    turns = sum(len(turns) for turns in schedules.rounds_of(trees))
    assert turns == sum(node.sampled for tree in trees for node in tree.nodes), "each turn of a tree counts once, whoever shares it"


def test_the_authors_rules_refill_one_trajectory_a_round() -> None:
    answers = schedules.Script(tool=schedules.LogNormal(median=1.0, sigma=0.0), token_seconds=0.01, answers=1.0)
    rounds = schedules.authors_rounds(answers, seed=0, trees=3)
    # 8 at once, then 8 more one at a time: the 9 rounds that their code takes for prompts without a tool call, where 1 would do.
    assert [len(turns) for turns in rounds] == [3 * 8] + [3] * 8


def test_the_authors_rules_give_every_group_its_size() -> None:
    script = schedules.Script(tool=schedules.LogNormal(median=1.0, sigma=1.0), token_seconds=0.01, max_calls=3)
    rounds = schedules.authors_rounds(script, seed=1, trees=4)
    answers = sum(tool == 0.0 for turns in rounds for _, tool in turns)
    assert answers == 4 * schedules.GROUP, "every trajectory ends with one answer"


# -- scale ---------------------------------------------------------------------------------------------------------------------------------------------


def test_seconds_of_a_step_follow_the_measured_table() -> None:
    engine = {1: 100.0, 3: 150.0}
    assert scale_sim.step_seconds(engine, 1) == pytest.approx(0.01)
    assert scale_sim.step_seconds(engine, 2) == pytest.approx(0.015)  # half way between 1/100 and 3/150
    assert scale_sim.step_seconds(engine, 3) == pytest.approx(0.02)
    assert scale_sim.step_seconds(engine, 30) == pytest.approx(0.2), "150 tokens a second at most"


def test_a_small_run_counts_what_it_does() -> None:
    run = scale_sim.recorded(16)
    assert run.trajectories == 32
    assert run.most_live >= 16
    assert run.turns >= run.trajectories
    assert 0 < run.codec + run.environment < run.sampler < run.cpu
    assert run.scheduler > 0
    assert run.sampled_tokens < run.unique_tokens


# -- sizing --------------------------------------------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_published_models() -> None:
    assert [round(model.parameters / 1e9, 1) for model in sizing.MODELS] == [3.1, 8.2, 14.8, 32.8]
    assert sizing.MODELS[1].kv_bytes == 36 * 8 * 128 * 2 * 2


def test_tokens_of_a_step_by_hand() -> None:
    work = sizing.Work(groups=1, group_size=4, initial=2, prompt=100, calls=2, turn=10, observation=20, branch_after=1)
    assert work.length == 100 + 3 * 10 + 2 * 20
    assert work.sampled == (2 * 3 + 2 * 2) * 10  # the two branches share their first turn
    assert work.unique == 100 + 2 * 70 + 2 * (70 - 30)
    assert work.total == 4 * 170


def test_memory_and_times_by_hand() -> None:
    model = sizing.Model(name="x", layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_size=2, vocabulary=10)
    # a layer: queries and output 4*4 each, keys and values 4*2 each, three matrices 4*8, two norms 4
    assert model.layer_parameters == 32 + 16 + 96 + 8
    assert model.parameters == 2 * 152 + 80 + 4
    assumptions = sizing.Assumptions(micro_batch=1, logit_chunk=0.0, mfu=0.5)
    layout = sizing.Layout(gpus=1, ranks=1, engines=1, tensor_parallel=1)
    assert layout.colocated
    assert sizing.learner_memory(model, layout, assumptions) * 1e9 == pytest.approx(16 * 388 + 2 * 388 + 2 * (2 * 4 + 4.68 * 4 + 4.94 * 8 + 10.37 * 4))
    gpu, work = sizing.GPU(memory=1, bandwidth=1, flops=1e6), sizing.Work()
    assert sizing.update_seconds(model, layout, gpu, work, assumptions) == pytest.approx(10 * 388 * work.total / 0.5e6)


def test_a_split_layout_overlaps_and_a_colocated_one_shares_memory() -> None:
    model, gpu, work, assumptions = sizing.MODELS[1], sizing.GPUS[1], sizing.Work(), sizing.Assumptions()
    split = sizing.evaluate(model, sizing.Layout(gpus=8, ranks=4, engines=4, tensor_parallel=1), gpu, work, assumptions)
    both = sizing.evaluate(model, sizing.Layout(gpus=8, ranks=8, engines=8, tensor_parallel=1), gpu, work, assumptions)
    assert split.one_behind == pytest.approx(max(split.sample, split.update) + split.transfer)
    assert split.on_policy == pytest.approx(split.sample + split.update + split.transfer)
    assert both.cache < split.cache, "the learner's state stays in the memory that the engine would have"
    assert both.update < split.update
    small = sizing.GPU(memory=16, bandwidth=1000)
    assert sizing.evaluate(model, sizing.Layout(gpus=8, ranks=8, engines=8, tensor_parallel=1), small, work, assumptions) is None


def test_the_page_holds_what_the_script_calculates() -> None:
    text = sizing.PAGE.read_text(encoding="utf-8")
    assert sizing.with_tables(text, sizing.page(sizing.Work(), sizing.Assumptions())) == text, "run benchmarks/performance/sizing.py --write"


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the lines"):
        sizing.with_tables("nothing", "tables")
