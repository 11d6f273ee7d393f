"""VLLMPolicy on a real vLLM engine: against TransformersPolicy, and against plain forwards, on the same weights.

Needs vLLM (``make test-vllm`` installs its CPU build). One engine serves the module; requests of the tests follow each other in it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from fakes import End, Talk, check_tree, sample_one
from vllm_fakes import BLOCK, CONTEXT, PIECES, TOLERANCE, VOCAB, Pieces, alone, close, counted, llama, prompt, right, together

from arpo_algo.branching import UniformBranching
from arpo_algo.policies import vllm_worker
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.policies.vllm import VLLMPolicy
from arpo_algo.policies.vllm_engine import probe_entropy_column

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),  # a start takes 15 s on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports, in its thread
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return llama(folder)


@pytest.fixture(scope="module")
def policy(model: Any, folder: Path) -> Iterator[VLLMPolicy]:
    state = torch.get_rng_state()
    with VLLMPolicy(folder, tokenizer=Pieces(), cache_bytes=1 << 26, max_batch=32) as policy:
        assert torch.equal(torch.get_rng_state(), state), "the start of the engine moved the global random state"
        yield policy


# --- the numbers ----------------------------------------------------------------------------------------------------------------------------------------


def test_greedy_turns_are_those_of_the_transformers_policy(policy: VLLMPolicy, model: Any) -> None:
    reference = TransformersPolicy(model, Pieces())
    assert (policy.vocab_size, policy.context_length, policy.eos_ids) == (VOCAB, CONTEXT, {7, 60})
    assert (reference.vocab_size, reference.context_length, reference.eos_ids) == (VOCAB, CONTEXT, {7, 60})
    requests = [(prompt(n, n), SamplingParams(max_new_tokens=40, temperature=0.0)) for n in (1, 2, 31, 32, 33, 64, 100, 200)]
    for got, want in zip(together(policy, requests), together(reference, requests), strict=True):
        close(got, want)


def test_numbers_are_those_of_the_distribution_sampled_from(policy: VLLMPolicy, model: Any) -> None:
    """Rows of one batch with unlike parameters: the column of each belongs to it and is not tempered."""
    kinds = [(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (1.3, 0.8), (1.0, 0.5), (0.0, 0.5)]
    requests = [(prompt(5 + 9 * i, i), SamplingParams(max_new_tokens=8 + i % 5, temperature=kinds[i % 6][0], top_p=kinds[i % 6][1], seed=i)) for i in range(40)]
    for got, (ids, params) in zip(together(policy, requests), requests, strict=True):
        right(model, ids, params, got)


def test_the_probe_refuses_a_column_that_holds_something_else(policy: VLLMPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy._engine.call(probe_entropy_column).result()
    monkeypatch.setattr(vllm_worker, "entropies", lambda logits: logits.float().softmax(-1).amax(-1).log())  # what vLLM has there
    with pytest.raises(RuntimeError, match="reports the entropy -"):
        policy._engine.call(probe_entropy_column).result()


def test_tokens_come_as_often_as_their_probability_says(policy: VLLMPolicy, model: Any) -> None:
    ids, n = prompt(6), 1500
    with torch.no_grad():
        p = model(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(-1).numpy()
    drawn = [got.token_ids[0] for got in together(policy, [(ids, SamplingParams(max_new_tokens=1, seed=i)) for i in range(n)])]
    likely = p * n >= 5
    counts = np.bincount(drawn, minlength=VOCAB)
    observed, expected = np.append(counts[likely], counts[~likely].sum()), np.append(p[likely], p[~likely].sum()) * n
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert degrees > 10 and chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_a_seed_decides_the_turn_in_any_company(policy: VLLMPolicy) -> None:
    ids = prompt(300, 3)
    seeds = [0, 1, -1, 2**63, 2**64, 2**64 + 1, -5]
    want = [alone(policy, ids, max_new_tokens=12, seed=seed).token_ids for seed in seeds]
    assert len({tuple(tokens) for tokens in want}) == len(seeds)
    crowd = [(prompt(400, 100 + i), SamplingParams(max_new_tokens=3 + i % 20, seed=i)) for i in range(40)]  # more prompt tokens than a step takes
    mine = [(ids, SamplingParams(max_new_tokens=12, seed=seed)) for seed in seeds]
    assert [got.token_ids for got in together(policy, crowd + mine)[40:]] == want


# --- ends of turns --------------------------------------------------------------------------------------------------------------------------------------


def test_stop_strings_end_a_turn_where_the_transformers_policy_ends_it(policy: VLLMPolicy, model: Any) -> None:
    reference = TransformersPolicy(model, Pieces())
    requests = []
    for i in range(12):
        ids = prompt(20, 50 + i)
        text = Pieces().decode(alone(reference, ids, max_new_tokens=30, temperature=0.0).token_ids)
        for start, length in ((0, 1), (3, 2), (5, 4), (len(text) - 3, 3)):
            stop = (text[start : start + length] or "never", "zzzz", text[8:11] or "nor this")
            requests.append((ids, SamplingParams(max_new_tokens=30, temperature=0.0, stop=stop)))
    got, want = together(policy, requests), together(reference, requests)
    for one, other in zip(got, want, strict=True):
        close(one, other)
    assert len({(one.stop_string, len(one.token_ids)) for one in got if one.stop_reason == "stop"}) > 10
    inside = [one for one in got if one.stop_reason == "stop" and one.stop_string and not Pieces().decode(one.token_ids).endswith(one.stop_string)]
    assert inside, "no turn ended in the middle of a token"
    assert policy._engine.call(lambda engine: engine.get_num_unfinished_requests()).result() == 0


def test_an_end_token_comes_before_a_stop_string_and_that_before_the_length(policy: VLLMPolicy, model: Any) -> None:
    for seed in range(400):
        got = alone(policy, prompt(4), max_new_tokens=6, seed=seed)
        if got.stop_reason == "eos" and len(got.token_ids) > 1:
            break
    n, end = len(got.token_ids), got.token_ids[-1]
    assert end in (7, 60) and not {7, 60} & set(got.token_ids[:-1])
    assert alone(policy, prompt(4), max_new_tokens=n, seed=seed, stop=(PIECES[end],)).stop_reason == "eos"
    last = PIECES[got.token_ids[-2]]
    assert alone(policy, prompt(4), max_new_tokens=n - 1, seed=seed).stop_reason == "length"
    stopped = alone(policy, prompt(4), max_new_tokens=n - 1, seed=seed, stop=(last,))
    assert (stopped.stop_reason, stopped.stop_string) == ("stop", last)


def test_the_context_can_be_filled_to_the_last_token(policy: VLLMPolicy, model: Any) -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0.0)
    ids = prompt(CONTEXT - 3, 9)
    close(alone(policy, ids, max_new_tokens=3, temperature=0.0), alone(TransformersPolicy(model, Pieces()), ids, max_new_tokens=3, temperature=0.0))
    assert params.max_new_tokens + len(ids) == policy.context_length


# --- what is shared -------------------------------------------------------------------------------------------------------------------------------------


def test_a_branch_computes_only_what_it_does_not_share(policy: VLLMPolicy) -> None:
    ids = prompt(100, 1000)
    turn = Generation(token_ids=[], logprobs=[], entropies=[], stop_reason="length")

    def first() -> None:
        nonlocal turn
        turn = alone(policy, ids, max_new_tokens=60, temperature=0.0, seed=1)

    assert counted(policy, first) == (100, 0)
    context = ids + turn.token_ids
    branch = context + prompt(40, 1001)  # an observation
    known = (len(context) - 1) // BLOCK * BLOCK  # whole blocks; the last sampled token was never fed
    assert counted(policy, lambda: alone(policy, branch, max_new_tokens=1)) == (len(branch) - known, known)
    shared = (len(branch) - 1) // BLOCK * BLOCK  # one token at least is computed: its logits are wanted
    siblings = [(branch, SamplingParams(max_new_tokens=4, seed=seed)) for seed in range(8)]
    assert counted(policy, lambda: together(policy, siblings)) == (8 * (len(branch) - shared), 8 * shared)


def test_branches_asked_for_at_once_share_a_prefix_that_nobody_had(policy: VLLMPolicy) -> None:
    ids = prompt(128 + 1, 2000)
    computed, reused = counted(policy, lambda: together(policy, [(ids, SamplingParams(max_new_tokens=1, seed=seed)) for seed in range(8)]))
    assert (computed, reused) == (129 + 7, 7 * 128)


# --- concurrency ----------------------------------------------------------------------------------------------------------------------------------------


def unfinished(policy: VLLMPolicy) -> int:
    return policy._engine.call(lambda engine: engine.get_num_unfinished_requests() + len(policy._engine._turns)).result()


@pytest.fixture(scope="module")
def endless(policy: VLLMPolicy) -> tuple[list[int], SamplingParams]:
    """A request that runs for long: greedy, into a repetition without an end token."""
    turns = together(policy, [(prompt(3, seed), SamplingParams(max_new_tokens=100, temperature=0.0)) for seed in range(20)])
    seed = next(seed for seed, turn in enumerate(turns) if turn.stop_reason == "length")
    return prompt(3, seed), SamplingParams(max_new_tokens=CONTEXT - 3, temperature=0.0)


def test_requests_join_a_running_batch_and_leave_it_when_cancelled(policy: VLLMPolicy, endless: tuple[list[int], SamplingParams]) -> None:
    async def main() -> None:
        long = asyncio.create_task(policy.generate(*endless))
        for _ in range(3):  # each waits for its own tokens alone
            await policy.generate(prompt(5), SamplingParams(max_new_tokens=2))
        assert not long.done() and unfinished(policy) > 0
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long

    asyncio.run(main())
    assert unfinished(policy) == 0


def test_requests_cancelled_before_they_join_never_run(policy: VLLMPolicy) -> None:
    async def main() -> None:
        go: Future[None] = Future()
        blocked = policy._engine.call(lambda engine: go.result())
        tasks = [asyncio.create_task(policy.generate(prompt(50, 3000 + i), SamplingParams(max_new_tokens=5))) for i in range(4)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        go.set_result(None)
        await asyncio.wrap_future(blocked)

    before = policy.stats.decoded_tokens
    asyncio.run(main())
    assert unfinished(policy) == 0 and policy.stats.decoded_tokens == before


def test_event_loops_come_and_go(policy: VLLMPolicy, endless: tuple[list[int], SamplingParams]) -> None:
    async def abandoned() -> None:
        task = asyncio.create_task(policy.generate(*endless))
        await policy.generate(prompt(5), SamplingParams(max_new_tokens=2))
        assert not task.done()  # and the loop closes under it

    asyncio.run(abandoned())
    assert alone(policy, prompt(5), max_new_tokens=2, temperature=0.0).token_ids
    assert unfinished(policy) == 0


# --- a tree ---------------------------------------------------------------------------------------------------------------------------------------------


class LetterCodec:
    """The single letters of :class:`Pieces`."""

    def prompt(self, messages: Sequence[Any]) -> list[int]:
        return [ord(c) - 97 for m in messages for c in m["content"]]

    def observation(self, text: str, messages: Sequence[Any], role: str, *, closed: bool) -> list[int]:
        return [ord(c) - 97 for c in text]

    def encode(self, text: str, *, plain: bool) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return Pieces().decode(list(token_ids))


def test_an_arpo_tree(policy: VLLMPolicy, model: Any) -> None:
    def reply(turns: list[str]) -> str | End:
        return End(1.0) if len(turns) == 3 else "observation" * 4

    env = Talk(reply, opening="question" * 20)
    settings: dict[str, Any] = {"group_size": 12, "initial": 4, "max_turn_tokens": 24, "codec": LetterCodec()}
    before = policy.stats.reused_tokens
    tree = sample_one(policy, env, UniformBranching(children=2), **settings)
    check_tree(tree, size=12, initial=4)
    branched = [t for t in tree.trajectories if t.origin == "branched"]
    assert branched
    # Every trajectory after the first shares the question; a branch shares the path before it too.
    assert policy.stats.reused_tokens - before >= 11 * 160 + 32 * len(branched)
    for trajectory in tree.trajectories:
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([trajectory.token_ids])).logits[0].log_softmax(-1)
        at = 0
        for node in trajectory.nodes():
            rows = logp[at - 1 : at - 1 + len(node.token_ids)] if node.role == "policy" else logp[:0]
            np.testing.assert_allclose(node.logprobs, [float(row[token]) for row, token in zip(rows, node.token_ids, strict=False)], atol=TOLERANCE)
            np.testing.assert_allclose(node.entropies, -(rows.exp() * rows).sum(-1), atol=TOLERANCE)
            at += len(node.token_ids)
    again = sample_one(policy, env, UniformBranching(children=2), **settings)
    assert [t.token_ids for t in again.trajectories] == [t.token_ids for t in tree.trajectories]


# --- weights --------------------------------------------------------------------------------------------------------------------------------------------


def test_an_update_under_requests_is_refused(policy: VLLMPolicy, model: Any, endless: tuple[list[int], SamplingParams]) -> None:
    async def main() -> None:
        task = asyncio.create_task(policy.generate(*endless))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while 1 requests were under way"):
            policy.update_weights(model.state_dict().items())
        task.cancel()

    asyncio.run(main())
    assert policy.version == 0


# --- refusals -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        ([], {}, "at least 1 token"),
        ([0] * 2040, {"max_new_tokens": 9}, r"prompt \(2040 tokens\) and max_new_tokens \(9\) exceed the context of 2048"),
        ([0, 61], {}, r"expected ids in \[0, 61\), got 0 to 61"),
        ([-1], {}, r"expected ids in \[0, 61\), got -1"),
        ([0], {"stop": ("",)}, "not empty"),
        ([0], {"temperature": 0.005}, "temperature must be 0 or at least 0.01 with vLLM, got 0.005"),
    ],
)
def test_bad_requests_are_refused(policy: VLLMPolicy, ids: list[int], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone(policy, ids, **{"max_new_tokens": 1, **kwargs})


def test_logits_without_a_distribution_raise(policy: VLLMPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "entropies", lambda logits: torch.full(logits.shape[:1], math.nan))
    with pytest.raises(FloatingPointError, match="entropy nan from vLLM"):
        alone(policy, [1], max_new_tokens=5)
    monkeypatch.undo()
    assert unfinished(policy) == 0 and alone(policy, [1], max_new_tokens=1).token_ids
