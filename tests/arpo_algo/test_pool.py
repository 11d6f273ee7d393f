"""Several policies as one: trees stay where their cache is, weights reach everybody or nobody, and what is lost is sampled again elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from fakes import check_tree, sample, wanderer

from arpo_algo.policies.base import Generation, SamplingParams, ServedPolicy
from arpo_algo.policies.pool import EngineLost, PolicyPool


class Engine:
    """Writes one token: the sum of its prompt, its weight and the seed. Dies of the turn ``dies_at``; refuses weights below 0."""

    context_length, vocab_size = 100, 1000

    def __init__(self, *, dies_at: int | None = None, dies_of_weights: bool = False) -> None:
        self.version, self.weight = 0, 0
        self.dies_at, self.dies_of_weights = dies_at, dies_of_weights
        self.trees: list[int | None] = []
        self.gate: asyncio.Event | None = None
        self.closed = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.trees.append(params.tree)
        version = self.version
        if self.gate is not None:
            await self.gate.wait()
        if self.dies_at is not None and len(self.trees) > self.dies_at:
            raise EngineLost("out of power")
        token = (sum(prompt_ids) + self.weight + params.seed) % 1000
        return Generation(token_ids=[token], logprobs=[0.0], entropies=[0.0], stop_reason="stop", version=version, versions=[version])

    def update_weights(self, weights: Any, **how: Any) -> None:
        if self.dies_of_weights:
            raise EngineLost("out of memory")
        ((_, tensor),) = list(weights)
        if tensor < 0:
            raise RuntimeError(f"weights must be at least 0, got {int(tensor)}")
        self.weight, self.version = int(tensor), self.version + 1

    def close(self) -> None:
        self.closed = True


def weights(value: int) -> Iterable[tuple[str, torch.Tensor]]:
    return iter([("w", torch.tensor(value))])


def turn(pool: PolicyPool, tree: int | None = None, *, seed: int = 0) -> Generation:
    return asyncio.run(pool.generate([1, 2], SamplingParams(max_new_tokens=1, tree=tree, seed=seed)))


def replaced(pool: PolicyPool) -> None:
    asyncio.run(pool.replaced())


def test_a_tree_stays_with_one_member_and_a_new_one_goes_to_the_idlest() -> None:
    engines = [Engine(), Engine(), Engine()]
    pool = PolicyPool(engines)
    assert isinstance(pool, ServedPolicy)

    async def main() -> None:
        for engine in engines:
            engine.gate = asyncio.Event()
        turns = []
        for tree in (0, 0, 0, 1, 2, 1, 3, None):  # 0: first; 1, 2: the idle ones; 3: beside 2, which has one turn; None: there or at 1
            turns.append(asyncio.create_task(pool.generate([1], SamplingParams(max_new_tokens=1, tree=tree))))
            await asyncio.sleep(0)
        for engine in engines:
            assert engine.gate is not None
            engine.gate.set()
        await asyncio.gather(*turns)

    asyncio.run(main())
    assert [engine.trees for engine in engines] == [[0, 0, 0], [1, 1, None], [2, 3]]
    for engine in engines:
        engine.gate = None
    pool.assign(0, 2)
    turn(pool, 0)
    assert engines[2].trees[-1] == 0
    pool.close()
    pool.close()
    assert all(engine.closed for engine in engines)
    with pytest.raises(RuntimeError, match="the pool is closed"):
        turn(pool)


def test_new_weights_reach_all_members_and_an_iterator_is_read_once() -> None:
    engines = [Engine(), Engine()]
    pool = PolicyPool(engines)
    pool.update_weights(weights(5))
    assert [(engine.weight, engine.version) for engine in engines] == [(5, 1), (5, 1)] and pool.version == 1
    assert turn(pool).token_ids == [8]


def test_weights_that_all_refuse_change_nothing() -> None:
    pool = PolicyPool([Engine(), Engine()])
    with pytest.raises(RuntimeError, match="weights must be at least 0, got -1"):
        pool.update_weights(weights(-1))
    assert pool.version == 0 and turn(pool).token_ids == [3]


def test_weights_that_only_some_take_end_the_pool() -> None:
    class Picky(Engine):
        def update_weights(self, weights: Any, **how: Any) -> None:
            raise RuntimeError("wrong shape")

    pool = PolicyPool([Engine(), Picky()])
    for call in (lambda: pool.update_weights(weights(1)), lambda: turn(pool)):
        with pytest.raises(RuntimeError, match="1 of 2 engines did not take the weights of version 1: wrong shape"):
            call()


def test_without_a_replacement_the_pool_shrinks_until_nobody_is_left() -> None:
    engines = [Engine(dies_at=1), Engine(dies_at=3)]
    pool = PolicyPool(engines)
    assert turn(pool, 0).token_ids == [3]
    assert turn(pool, 0).token_ids == [3], "the turn is sampled again by the other"
    assert (pool.losses, [engine.trees for engine in engines]) == (1, [[0, 0], [0]])
    pool.update_weights(weights(1))
    assert (engines[0].version, engines[1].version) == (0, 1)
    turn(pool, 0)
    turn(pool, 0)
    with pytest.raises(EngineLost, match="all 2 engines are lost"):
        turn(pool, 0)


def test_a_replacement_has_the_present_weights_and_says_their_version() -> None:
    made: list[Engine] = []

    def replace(index: int) -> Engine:
        made.append(Engine())
        return made[-1]

    first = Engine(dies_at=0)
    pool = PolicyPool([first], replace=replace)
    live = torch.tensor(5)
    for _ in range(3):
        pool.update_weights([("w", live)])
    live += 1  # the learner is at work on the next version
    got = turn(pool)
    assert (got.token_ids, got.version, got.versions) == ([8], 3, [3])
    assert (made[0].version, pool.version, pool.replacements, first.closed) == (1, 3, 1, True)
    pool.update_weights([("w", live)])
    got = turn(pool)
    assert (got.token_ids, got.version, made[0].version) == ([9], 4, 2)


def test_the_others_serve_while_a_replacement_starts() -> None:
    start = threading.Event()

    def replace(index: int) -> Engine:
        assert start.wait(60)
        return Engine()

    pool = PolicyPool([Engine(dies_at=0), Engine()], replace=replace)
    assert turn(pool, 0).token_ids == [3]
    assert pool.policies[0] is None
    pool.update_weights(weights(7))  # comes before the replacement, which must not miss it
    start.set()
    replaced(pool)
    new = pool.policies[0]
    assert isinstance(new, Engine) and new.weight == 7


def test_the_only_member_may_be_lost_as_an_update_begins() -> None:
    """Its replacement waits for the update, which must not wait for a thread in turn."""
    came = threading.Event()

    class Fleeting(Engine):
        @property
        def update_weights(self) -> Any:  # type: ignore[override]
            pool.lose(0, self, EngineLost("out of power"))
            assert came.wait(60)
            return super().update_weights

    def replace(index: int) -> Engine:
        came.set()
        return Engine()

    pool = PolicyPool([Fleeting()], replace=replace)
    update = threading.Thread(target=pool.update_weights, args=(weights(4),), daemon=True)
    update.start()
    update.join(60)
    assert not update.is_alive()
    assert turn(pool).token_ids == [7] and pool.version == 1


def test_one_lost_during_an_update_gets_the_weights_when_it_is_replaced() -> None:
    pool = PolicyPool([Engine(), Engine(dies_of_weights=True)], replace=lambda index: Engine())
    pool.update_weights(weights(4))
    replaced(pool)
    assert [policy.weight for policy in pool.policies if isinstance(policy, Engine)] == [4, 4]
    assert pool.version == 1


@pytest.mark.parametrize(
    ("replace", "limit", "message"),
    [
        (lambda index: Engine(dies_at=0), 2, "engine 0 is lost after max_replacements=2 were replaced: out of power"),
        (lambda index: Engine(dies_of_weights=True), 1, "engine 0 is lost after max_replacements=1 were replaced: out of memory"),
        (lambda index: 1 / 0, 3, "engine 0 could not be replaced: ZeroDivisionError"),
    ],
)
def test_replacing_has_an_end(replace: Callable[[int], Any], limit: int, message: str) -> None:
    pool = PolicyPool([Engine(dies_at=0)], replace=replace, max_replacements=limit)
    pool.update_weights(weights(1))
    for _ in range(2):
        with pytest.raises(EngineLost, match=message):
            turn(pool)


def test_other_errors_are_the_callers() -> None:
    class Strict(Engine):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
            raise ValueError("too long")

    pool = PolicyPool([Strict()])
    with pytest.raises(ValueError, match="too long"):
        turn(pool)
    assert pool.losses == 0


def test_a_turn_that_is_cancelled_does_not_count_as_under_way() -> None:
    engines = [Engine(), Engine()]
    pool = PolicyPool(engines)

    async def main() -> None:
        engines[0].gate = asyncio.Event()
        waiting = asyncio.create_task(pool.generate([1], SamplingParams(max_new_tokens=1, tree=0)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engines[0].gate = None
        await pool.generate([1], SamplingParams(max_new_tokens=1, tree=1))

    asyncio.run(main())
    assert engines[0].trees == [0, 1]


def test_policies_of_different_models_and_none_at_all_are_refused() -> None:
    other = Engine()
    other.context_length = 50
    with pytest.raises(ValueError, match="expected policies of one model"):
        PolicyPool([Engine(), other])
    with pytest.raises(ValueError, match="at least one policy"):
        PolicyPool([])


def test_trees_do_not_change_when_members_die() -> None:
    from fakes import Writer

    class Mortal(Writer):
        def __init__(self, dies_at: int) -> None:
            super().__init__(wanderer())
            self.dies_at = dies_at

        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
            if len(self.calls) >= self.dies_at:
                raise EngineLost("gone")
            return await super().generate(prompt_ids, params)

        def update_weights(self, weights: Any) -> None: ...

        def close(self) -> None: ...

    options = [{"task": str(n)} for n in range(4)]
    expected = [tree.canonical() for tree in sample(Writer(wanderer()), options=options)]
    pool = PolicyPool([Mortal(3), Mortal(10)], replace=lambda index: Mortal(10_000))
    trees = sample(pool, options=options)
    assert [tree.canonical() for tree in trees] == expected
    assert pool.losses >= 1
    for tree in trees:
        check_tree(tree, size=4, initial=2)
