"""ServerPolicy over vLLM's own OpenAI-compatible server, against TransformersPolicy on the same weights.

Needs vLLM with what its server needs (``make test-vllm`` installs both). One server, in processes of its own, serves the module; the last test kills it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)
if importlib.util.find_spec("uvicorn") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):
    pytest.skip("what vLLM's server needs is not installed", allow_module_level=True)

import psutil
import torch
from fakes import Talk, check_tree, sample_one
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm_fakes import CONTEXT, PIECES, VOCAB, alone, llama, prompt, together

from arpo_algo.branching import EntropyBranching
from arpo_algo.metrics import rollout_metrics
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.server import ServerError, ServerPolicy
from arpo_algo.policies.transformers import TransformersPolicy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # a start takes 60 s on an idle machine
]
TOLERANCE = 1e-4
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip
OPTIONS = [
    "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT),
    "--kv-cache-memory-bytes", str(1 << 25), "--block-size", "32", "--max-num-seqs", "32",
]  # fmt: skip


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """As :class:`vllm_fakes.Pieces`, in a form that vLLM's server loads."""
    words = Tokenizer(WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token=PIECES[0]))
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def reference(folder: Path) -> TransformersPolicy:
    model = llama(folder)
    return TransformersPolicy(model, save_tokenizer(folder))


@pytest.fixture(scope="module")
def server(folder: Path, reference: TransformersPolicy) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a running server, and its process."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *OPTIONS]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder)},
    )
    assert process.stdout is not None
    drain = threading.Thread(target=process.stdout.read)  # a full pipe would stop the server
    log = []
    try:
        for line in process.stdout:
            log.append(line)
            if "Application startup complete" in line:
                drain.start()
                (port,) = {c.laddr.port for c in psutil.Process(process.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
                yield f"http://127.0.0.1:{port}/v1", process
                break
        else:
            pytest.fail("the server did not start:\n" + "".join(log[-40:]))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the engine's processes too
        process.wait()
        if drain.ident is not None:
            drain.join()
        process.stdout.close()


@pytest.fixture(scope="module")
def policy(server: tuple[str, Any], reference: TransformersPolicy) -> Iterator[ServerPolicy]:
    with ServerPolicy(server[0], "tiny", reference.tokenizer, vocab_size=VOCAB, eos_ids=reference.eos_ids, max_retries=3, backoff=0.01) as policy:
        yield policy


def test_greedy_turns_are_those_of_the_transformers_policy(policy: ServerPolicy, reference: TransformersPolicy) -> None:
    assert (policy.context_length, policy.eos_ids) == (CONTEXT, {7, 60})
    requests = [(prompt(n, n), SamplingParams(max_new_tokens=40, temperature=0.0)) for n in (1, 2, 31, 32, 33, 64, 100, 200)]
    for got, want in zip(together(policy, requests), together(reference, requests), strict=True):
        assert (got.token_ids, got.stop_reason) == (want.token_ids, want.stop_reason)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=TOLERANCE)
        within_bounds(got, want.entropies)


def within_bounds(got: Generation, entropies: list[float]) -> None:
    assert got.bounds is not None
    for lower, estimate, exact, upper in zip(got.bounds.lower, got.entropies, entropies, got.bounds.upper, strict=True):
        assert lower - TOLERANCE <= exact <= upper + TOLERANCE
        assert lower <= estimate <= upper


def exact(reference: TransformersPolicy, ids: list[int], turn: Generation) -> tuple[list[float], list[float]]:
    """Log-probabilities and entropies of a turn, from a plain forward."""
    with torch.no_grad():
        logits = reference.model(input_ids=torch.tensor([ids + turn.token_ids])).logits[0, len(ids) - 1 : -1].double()
    return logits.log_softmax(-1)[range(len(turn.token_ids)), turn.token_ids].tolist(), torch.special.entr(logits.softmax(-1)).sum(-1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_turns_have_the_numbers_of_the_untempered_distribution(policy: ServerPolicy, reference: TransformersPolicy, temperature: float) -> None:
    requests = [(prompt(5 + 7 * seed, seed), SamplingParams(max_new_tokens=30, temperature=temperature, seed=seed)) for seed in range(16)]
    turns = together(policy, requests)
    for (ids, _), got in zip(requests, turns, strict=True):
        logprobs, entropies = exact(reference, ids, got)
        within_bounds(got, entropies)
        if temperature == 1:
            np.testing.assert_allclose(got.logprobs, logprobs, atol=TOLERANCE)
        else:
            assert np.isnan(got.logprobs).all()
    assert [turn.token_ids for turn in together(policy, requests)] == [turn.token_ids for turn in turns]


def test_turns_end_at_stop_strings_as_everywhere(policy: ServerPolicy, reference: TransformersPolicy) -> None:
    whole = alone(reference, prompt(20), max_new_tokens=30, temperature=0.0)
    text = reference.tokenizer.decode(whole.token_ids)
    for stop in ((text[5:8],), (text[9:12], "zq"), (text[-4:],)):
        want = alone(reference, prompt(20), max_new_tokens=30, temperature=0.0, stop=stop)
        got = alone(policy, prompt(20), max_new_tokens=30, temperature=0.0, stop=stop)
        assert (got.token_ids, got.stop_reason, got.stop_string) == (want.token_ids, want.stop_reason, want.stop_string)
        assert got.stop_reason == "stop"


class LetterCodec:
    """Single letters."""

    def prompt(self, messages: Any) -> list[int]:
        return [ord(c) - 97 for c in messages[0]["content"]]

    def observation(self, text: str, messages: Any, role: str, *, closed: bool) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(PIECES[i] for i in ids)


def test_a_rollout_branches_by_estimates(policy: ServerPolicy) -> None:
    settings: dict[str, Any] = {"group_size": 10, "initial": 3, "max_turn_tokens": 12, "max_context": 120, "window": 5, "codec": LetterCodec()}
    tree = sample_one(policy, Talk(lambda turns: "observation", opening="question"), EntropyBranching(), **settings)
    check_tree(tree, size=10, initial=3)
    assert any(trajectory.origin == "branched" for trajectory in tree.trajectories)
    metrics = rollout_metrics([tree])
    assert metrics["branch/unsettled"] == sum(not decision.settled for decision in tree.decisions) == tree.metadata["unsettled"]
    assert 0.3 < metrics["entropy/mass_covered"] < 1


def test_a_request_that_the_server_refuses_says_why(server: tuple[str, Any], reference: TransformersPolicy) -> None:
    with pytest.raises(ServerError, match=r"refused with status 400: .*logprobs"):  # vLLM grants 20
        ServerPolicy(server[0], "tiny", reference.tokenizer, vocab_size=VOCAB, top_logprobs=30)
    with pytest.raises(ServerError, match=r"names the models \['tiny'\], and not 'huge'"):
        ServerPolicy(server[0], "huge", reference.tokenizer, vocab_size=VOCAB)
    with pytest.raises(ServerError, match=r"knows the id \d+: vocab_size=30 is too small"):
        ServerPolicy(server[0], "tiny", reference.tokenizer, vocab_size=30)


def test_cancelled_turns_leave_the_server(policy: ServerPolicy) -> None:
    async def main() -> None:
        turns = [asyncio.create_task(policy.generate(prompt(9, n), SamplingParams(max_new_tokens=CONTEXT - 9, seed=n))) for n in range(40)]
        done, _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        assert done

    asyncio.run(main())
    assert alone(policy, prompt(9), max_new_tokens=3, temperature=0.0).token_ids


def test_a_server_that_dies_is_an_error_that_says_so(server: tuple[str, subprocess.Popen[str]], policy: ServerPolicy) -> None:
    async def main() -> list[Any]:
        turns = [asyncio.create_task(policy.generate(prompt(9, n), SamplingParams(max_new_tokens=CONTEXT - 9, temperature=0.0))) for n in range(40)]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)  # the others are in the middle
        os.killpg(server[1].pid, signal.SIGKILL)
        return await asyncio.gather(*turns, return_exceptions=True)

    outcomes = asyncio.run(main())
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Generation)]
    assert failed
    for error in failed:
        assert isinstance(error, ServerError)
        assert re.search(r"POST http://127.0.0.1:\d+/v1/completions failed 4 times, the last time with ConnectError", str(error))
