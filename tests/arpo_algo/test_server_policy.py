"""ServerPolicy against a small server that speaks vLLM's completions: right numbers, turn ends, and every way in which a server can fail."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from fakes import Talk, check_tree, sample_one

from arpo_algo.branching import UniformBranching
from arpo_algo.entropy import Floats
from arpo_algo.policies.base import Generation, Policy, SamplingParams, ServedPolicy
from arpo_algo.policies.server import ServerError, ServerPolicy

pytestmark = pytest.mark.timeout(120)
V, K, CONTEXT = 26, 8, 500
EOS = 25

Answer = dict[str, Any]


class Letters:
    """Id i is the i-th letter."""

    eos_token_id = EOS

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(97 + i) for i in ids)

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]


class LetterCodec(Letters):
    """Text as it is, where it is letters."""

    def prompt(self, messages: Any) -> list[int]:
        return self.encode(messages[0]["content"])

    def observation(self, text: str, messages: Any, role: str, *, closed: bool) -> list[int]:
        return self.encode(text)


def probabilities(context: Sequence[int]) -> Floats:
    """The model: a distribution for each context."""
    logits = 2.0 * np.random.default_rng([7, *context]).normal(size=V)
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def entropy(p: Floats) -> float:
    return float(-(p * np.log(p)).sum())


class Server(ThreadingHTTPServer):
    """Answers as vLLM does. ``change`` may alter an answer, ``before`` may fail, wait, or end a connection; both see the body of the request."""

    daemon_threads = True
    request_queue_size = 512
    allow_reuse_address = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.models: Any = {"data": [{"id": "letters", "max_model_len": CONTEXT}]}
        self.bodies: list[Answer] = []
        self.keys: set[str | None] = set()
        self.change: Callable[[Answer, Answer], Any] = lambda answer, body: answer
        self.before: Callable[[Answer, Handler], bool] = lambda body, handler: False
        self.end: Callable[[list[int], Answer], tuple[str, int | str] | None] = lambda ids, body: None
        """May end a turn where the model itself does not."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self.reply(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if not self.server.before(body, self):
            self.reply(200, self.server.change(self.complete(body), body))

    def complete(self, body: Answer) -> Answer:
        ids: list[int] = []
        chosen, rows = [], []
        reason: tuple[str, int | str | None] | None = None
        while reason is None:
            p = probabilities(body["prompt"] + ids)
            order = np.argsort(-p)
            draw = np.random.default_rng([body["seed"], len(ids)]).random()
            tempered = p ** (1 / (body["temperature"] or 1.0))
            token = int(order[0]) if body["temperature"] == 0 else int(np.searchsorted(np.cumsum(tempered / tempered.sum()), draw))
            ids.append(token)
            chosen.append(math.log(p[token]))
            rows.append({f"token_id:{i}": math.log(p[i]) for i in dict.fromkeys([token, *map(int, order[: body["logprobs"]])])})
            stops = [stop for stop in body["stop"] if stop in Letters().decode(ids)]
            if token in body["stop_token_ids"]:
                reason = ("stop", token)
            elif stops:
                reason = ("stop", stops[0])
            elif len(ids) == body["max_tokens"]:
                reason = ("length", None)
            else:
                reason = self.server.end(ids, body)
        logprobs = {"tokens": list(rows), "token_logprobs": chosen, "top_logprobs": rows}
        return {"choices": [{"token_ids": ids, "prompt_token_ids": body["prompt"], "logprobs": logprobs, "finish_reason": reason[0], "stop_reason": reason[1]}]}

    def reply(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def connect(server: Server, **settings: Any) -> ServerPolicy:
    given = {"vocab_size": V, "top_logprobs": K, "max_retries": 2, "backoff": 0.001, "timeout": 60.0, **settings}
    return ServerPolicy(server.url, "letters", Letters(), **given)


@pytest.fixture
def policy(server: Server) -> Iterator[ServerPolicy]:
    with connect(server) as policy:
        server.bodies.clear()
        yield policy


def ask(policy: ServerPolicy, prompt: list[int], **params: Any) -> Generation:
    return asyncio.run(policy.generate(prompt, SamplingParams(**params)))


# -- numbers -----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_numbers_are_those_of_the_model(policy: ServerPolicy, server: Server, temperature: float) -> None:
    got = ask(policy, [1, 2, 3], max_new_tokens=20, temperature=temperature, seed=5)
    assert got.bounds is not None
    for n, token in enumerate(got.token_ids):
        p = probabilities([1, 2, 3, *got.token_ids[:n]])
        assert got.logprobs[n] == pytest.approx(math.log(p[token]))
        assert temperature or token == int(p.argmax())
        assert got.bounds.lower[n] <= entropy(p) <= got.bounds.upper[n]
        assert got.bounds.lower[n] <= got.entropies[n] <= got.bounds.upper[n]
        assert got.bounds.covered[n] == pytest.approx(-np.sort(-p)[:K].sum())  # the sampled one is not counted where it is not among the first K
    assert len(got.token_ids) == len(got.logprobs) == len(got.entropies) == len(got.bounds) > 1
    assert got.version == policy.version == 0
    if temperature:
        assert any(token not in np.argsort(-probabilities([1, 2, 3, *got.token_ids[:n]]))[:K] for n, token in enumerate(got.token_ids))
        assert ask(policy, [1, 2, 3], max_new_tokens=20, seed=5) == got
        assert ask(policy, [1, 2, 3], max_new_tokens=20, seed=6).token_ids != got.token_ids


def test_all_log_probabilities_give_exact_entropies(server: Server) -> None:
    with connect(server, top_logprobs=99) as policy:
        got = ask(policy, [4], max_new_tokens=10, seed=1)
    assert got.bounds is not None and got.bounds.lower == got.bounds.upper == tuple(got.entropies)
    assert got.entropies == pytest.approx([entropy(probabilities([4, *got.token_ids[:n]])) for n in range(len(got.token_ids))])


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.9)])
def test_log_probabilities_that_cannot_be_known_are_not_made_up(policy: ServerPolicy, temperature: float, top_p: float) -> None:
    got = ask(policy, [1], max_new_tokens=10, temperature=temperature, top_p=top_p)
    assert np.isnan(got.logprobs).all() and len(got.logprobs) == len(got.token_ids)
    assert got.bounds is not None
    for n, (lower, upper) in enumerate(zip(got.bounds.lower, got.bounds.upper, strict=True)):
        assert lower <= entropy(probabilities([1, *got.token_ids[:n]])) <= upper  # of the untempered distribution


def test_a_request_leaves_nothing_to_the_servers_defaults(policy: ServerPolicy, server: Server) -> None:
    ask(policy, [3, 1], max_new_tokens=4, temperature=0.5, top_p=0.9, stop=("ab",), seed=2**70 - 1)
    (body,) = server.bodies
    assert body == {
        "model": "letters", "prompt": [3, 1], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "stop": ["ab"], "stop_token_ids": [EOS], "logprobs": K,
        "seed": 2**63 - 1, "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False, "ignore_eos": True, "top_k": 0,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


# -- ends --------------------------------------------------------------------------------------------------------------------------------------------------


def greedy(n: int, start: Sequence[int] = (1,)) -> list[int]:
    ids = list(start)
    for _ in range(n):
        ids.append(int(probabilities(ids).argmax()))
    return ids[len(start) :]


def test_what_the_server_wrote_past_the_end_is_cut(policy: ServerPolicy, server: Server) -> None:
    """A server that looks for stop strings only now and then."""
    line = greedy(12)
    stop = Letters().decode(line[4:6])

    def ignores_stops(body: Answer, handler: Handler) -> bool:
        handler.reply(200, handler.complete({**body, "stop": [], "stop_token_ids": []}))
        return True

    server.before = ignores_stops
    got = ask(policy, [1], max_new_tokens=12, temperature=0.0, stop=(stop,))
    end = Letters().decode(line).index(stop) + 2
    assert (got.token_ids, got.stop_reason, got.stop_string) == (line[:end], "stop", stop)
    assert len(got.logprobs) == len(got.entropies) == end and got.bounds is not None and len(got.bounds) == end
    with connect(server, eos_ids=[line[3]]) as ends_at_four:
        got = ask(ends_at_four, [1], max_new_tokens=12, temperature=0.0)
        end = line.index(line[3]) + 1
        assert (got.token_ids, got.stop_reason) == (line[:end], "eos")


def test_where_the_server_stopped_too_early_the_rest_is_asked_for(policy: ServerPolicy, server: Server) -> None:
    server.end = lambda ids, body: ("length", None) if len(ids) == 5 else None  # type: ignore[assignment,return-value]
    line = greedy(12)
    assert EOS not in line
    got = ask(policy, [1], max_new_tokens=12, temperature=0.0, seed=7)
    assert (got.token_ids, got.stop_reason) == (line, "length")
    assert [(body["prompt"], body["max_tokens"], body["seed"]) for body in server.bodies] == [
        ([1], 12, 7), ([1, *line[:5]], 7, 12), ([1, *line[:10]], 2, 17),
    ]  # fmt: skip
    assert got.logprobs == pytest.approx([math.log(probabilities([1, *line[:n]])[line[n]]) for n in range(12)])


def test_an_end_id_of_the_servers_own_is_named(policy: ServerPolicy, server: Server) -> None:
    server.end = lambda ids, body: ("stop", ids[-1]) if len(ids) == 3 else None
    with pytest.raises(ServerError, match=rf"ends turns at the id {greedy(3)[2]}, which is not among eos_ids=\[25\]: add it there"):
        ask(policy, [1], max_new_tokens=12, temperature=0.0)


def test_a_turn_without_a_token_is_an_error(policy: ServerPolicy, server: Server) -> None:
    empty = {"token_logprobs": [], "top_logprobs": []}
    server.change = lambda answer, body: {"choices": [{"token_ids": [], "prompt_token_ids": body["prompt"], "logprobs": empty, "finish_reason": "abort"}]}
    with pytest.raises(ServerError, match="without a token, for the reason 'abort'"):
        ask(policy, [1], max_new_tokens=3)


# -- many at once, cancelled, closed -------------------------------------------------------------------------------------------------------------------------


def test_requests_run_beside_each_other(policy: ServerPolicy, server: Server) -> None:
    """Every request waits in the server for all the others, more than an HTTP client has connections by default."""
    arrived = threading.Barrier(120)
    server.before = lambda body, handler: bool(arrived.wait(100)) and False

    async def main() -> list[Generation]:
        return await asyncio.gather(*(policy.generate([1], SamplingParams(max_new_tokens=3, seed=seed)) for seed in range(120)))

    assert len({tuple(turn.token_ids) for turn in asyncio.run(main())}) > 1


def test_cancelling_closes_the_request(policy: ServerPolicy, server: Server) -> None:
    arrived, gone = threading.Event(), threading.Event()

    def hangs(body: Answer, handler: Handler) -> bool:
        arrived.set()
        if handler.connection.recv(1) == b"":  # the client closed its end
            gone.set()
        handler.close_connection = True
        return True

    server.before = hangs

    async def main() -> None:
        turn = asyncio.create_task(policy.generate([1], SamplingParams(max_new_tokens=3)))
        await asyncio.to_thread(arrived.wait, 60)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(main())
    assert gone.wait(60)
    server.before = lambda body, handler: False
    assert ask(policy, [1], max_new_tokens=3).token_ids  # the policy lives on


def test_closing_ends_turns_under_way(server: Server) -> None:
    policy = connect(server)
    arrived = threading.Event()

    def hangs(body: Answer, handler: Handler) -> bool:
        arrived.set()
        handler.connection.recv(1)
        handler.close_connection = True
        return True

    server.before = hangs

    async def main() -> None:
        turn = asyncio.create_task(policy.generate([1], SamplingParams(max_new_tokens=3)))
        await asyncio.to_thread(arrived.wait, 60)
        policy.close()
        with pytest.raises(ServerError, match="was closed"):
            await turn

    asyncio.run(main())
    policy.close()
    with pytest.raises(ServerError, match="was closed"):
        ask(policy, [1], max_new_tokens=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "server-policy"]


# -- failures ----------------------------------------------------------------------------------------------------------------------------------------------


def failing(times: int, fail: Callable[[Handler], None]) -> Callable[[Answer, Handler], bool]:
    """Fails the first requests."""
    left = [times]

    def before(body: Answer, handler: Handler) -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        fail(handler)
        return True

    return before


def drop(handler: Handler) -> None:
    """Ends the connection without an answer."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def half(handler: Handler) -> None:
    """Ends the connection in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    drop(handler)


PASSING: list[tuple[Callable[[Handler], None], str]] = [
    (lambda handler: handler.reply(429, "slow down", {"Retry-After": "0"}), "status 429: slow down"),
    (lambda handler: handler.reply(503, "loading", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "status 503: loading"),
    (lambda handler: handler.reply(500, "out of memory"), "status 500: out of memory"),
    (drop, "RemoteProtocolError|ReadError"),
    (half, "RemoteProtocolError|ReadError"),
]


@pytest.mark.parametrize(("fail", "message"), PASSING)
def test_failures_that_may_pass_are_tried_again(policy: ServerPolicy, server: Server, fail: Callable[[Handler], None], message: str) -> None:
    want = ask(policy, [1], max_new_tokens=5, seed=3)
    server.bodies.clear()
    server.before = failing(2, fail)
    assert ask(policy, [1], max_new_tokens=5, seed=3) == want
    assert len(server.bodies) == 3 and server.bodies[0] == server.bodies[2]
    server.before = failing(3, fail)
    with pytest.raises(ServerError, match=rf"POST {server.url}/completions failed 3 times, the last time with .*({message})"):
        ask(policy, [1], max_new_tokens=5)


def test_what_the_server_refuses_is_not_tried_again(policy: ServerPolicy, server: Server) -> None:
    server.before = failing(1, lambda handler: handler.reply(400, {"error": {"message": "no such parameter" + "!" * 1000}}))
    with pytest.raises(ServerError, match=r"refused with status 400: .*no such parameter!+\.\.\.$"):
        ask(policy, [1], max_new_tokens=5)
    assert len(server.bodies) == 1


def test_a_server_that_is_gone_is_named(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"  # nobody listens there
        with pytest.raises(ServerError, match=rf"GET {url}/models failed 2 times, the last time with ConnectError"):
            ServerPolicy(url, "letters", Letters(), vocab_size=V, max_retries=1, backoff=0.001)


def test_a_turn_has_a_deadline(policy: ServerPolicy, server: Server) -> None:
    policy.timeout = 0.2  # the probe had longer
    server.before = lambda body, handler: bool(handler.connection.recv(1)) or True  # until the client closes
    with pytest.raises(ServerError, match=r"did not answer within timeout=0.2 seconds"):
        ask(policy, [1], max_new_tokens=5)
    server.before = failing(10**6, lambda handler: handler.reply(429, "wait", {"Retry-After": "1000"}))  # longer than anybody waits
    with pytest.raises(ServerError, match=r"did not answer within timeout=0.2 seconds"):
        ask(policy, [1], max_new_tokens=5)


# -- the probe ---------------------------------------------------------------------------------------------------------------------------------------------


def choice(**changes: Any) -> Callable[[Answer, Answer], Answer]:
    """Changes the one choice of an answer."""
    return lambda answer, body: {"choices": [answer["choices"][0] | {name: f(answer["choices"][0]) for name, f in changes.items()}]}


def rows(f: Callable[[Answer], Answer]) -> Callable[[Answer, Answer], Answer]:
    """Changes the log-probabilities listed for each token."""
    return choice(logprobs=lambda c: {**c["logprobs"], "top_logprobs": [f(row) for row in c["logprobs"]["top_logprobs"]]})


def tempered(answer: Answer, body: Answer) -> Answer:
    def row(old: Answer) -> Answer:
        p = probabilities(body["prompt"]) ** (1 / body["temperature"])
        return {name: math.log(p[int(name.removeprefix("token_id:"))] / p.sum()) for name in old}

    return rows(row)(answer, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (choice(token_ids=lambda c: None), "no token ids: it must know return_token_ids"),
        (choice(prompt_token_ids=lambda c: None), "no token ids: it must know return_token_ids"),
        (choice(prompt_token_ids=lambda c: [0, *c["prompt_token_ids"]]), "did not take the prompt as it is: 1 ids were sent, it saw 2"),
        (choice(logprobs=lambda c: None), "no log-probabilities: it must know logprobs"),
        (choice(logprobs=lambda c: {"token_logprobs": [], "top_logprobs": []}), "no log-probability for each of 1 tokens"),
        (rows(lambda row: {Letters().decode([i]): value for i, value in enumerate(row.values())}), "by the text of tokens: it must know return_tokens_as_"),
        (rows(lambda row: dict(list(row.items())[:5])), "returned [45] log-probabilities where 8 were asked for: lower top_logprobs"),
        (rows(lambda row: {**row, "token_id:26": -9.0}), "knows the id 26: vocab_size=26 is too small"),
        (rows(lambda row: {name: math.nan for name in row}), "at most 0, got nan"),
        (rows(lambda row: {name: None for name in row}), "at most 0, got None"),
        (rows(lambda row: {name: 3.5 for name in row}), "at most 0, got 3.5"),  # logits
        (rows(lambda row: {name: -0.1 for name in row}), "no distribution over|not of a distribution over vocab_size=26"),
        (tempered, "of the tempered distribution, .* --logprobs-mode raw_logprobs"),
        (lambda answer, body: "<html>hello</html>", "answered no JSON: <html>hello</html>"),
        (lambda answer, body: ["no", "completion"], "something else than one completion: "),
        (lambda answer, body: {"choices": answer["choices"] * 2}, "something else than one completion: "),
    ],
)
def test_a_server_that_lacks_something_is_refused_before_the_first_turn(server: Server, change: Callable[[Answer, Answer], Any], message: str) -> None:
    server.change = change
    with pytest.raises(ServerError, match=message):
        connect(server)
    assert not [thread for thread in threading.enumerate() if thread.name == "server-policy"]


def test_an_impossible_token_has_probability_zero(server: Server) -> None:
    """-9999 is vLLM's minus infinity; a distribution with no tail has an exact entropy."""
    server.change = choice(logprobs=lambda c: {"token_logprobs": [0.0], "top_logprobs": [{f"token_id:{i}": -9999.0 if i else 0.0 for i in range(K)}]})
    with connect(server) as policy:
        got = ask(policy, [1], max_new_tokens=1)
    assert got.bounds is not None and (got.entropies, got.bounds.upper, got.bounds.covered) == ([0.0], (0.0,), (1.0,))


@pytest.mark.parametrize(
    ("models", "settings", "error", "message"),
    [
        ({"data": [{"id": "numbers"}]}, {}, ServerError, r"names the models \['numbers'\], and not 'letters'"),
        ({"detail": "none"}, {}, ServerError, r"names the models \[\]"),
        ({"data": [{"id": "letters"}]}, {}, ServerError, "names no max_model_len of the model 'letters': pass context_length"),
        (None, {"context_length": CONTEXT + 1}, ValueError, "context_length must be at most the 500 tokens that the server holds, got 501"),
        (None, {"url": "127.0.0.1:8000/v1"}, ValueError, "begins with http:// or https://, got '127.0.0.1:8000/v1'"),
        (None, {"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
        (None, {"top_logprobs": 0}, ValueError, "top_logprobs must be at least 1, got 0"),
        (None, {"max_retries": -1}, ValueError, "max_retries must be at least 0, got -1"),
        (None, {"timeout": 0.0}, ValueError, "timeout must be above 0"),
    ],
)
def test_settings_that_do_not_fit_the_server(server: Server, models: Any, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    server.models = models or server.models
    with pytest.raises(error, match=message):
        ServerPolicy(**{"url": server.url, "model": "letters", "tokenizer": Letters(), "vocab_size": V, "top_logprobs": K, **settings})


def test_the_context_length_is_the_servers_unless_said_otherwise(server: Server) -> None:
    with connect(server) as policy, connect(server, context_length=30) as short:
        assert (policy.context_length, short.context_length) == (CONTEXT, 30)
        with pytest.raises(ValueError, match=r"prompt \(1 tokens\) and max_new_tokens \(30\) exceed the context of 30"):
            ask(short, [1], max_new_tokens=30)


def test_bad_requests_are_refused_before_anything_is_sent(policy: ServerPolicy, server: Server) -> None:
    for prompt, params, message in [
        ([], {}, "at least 1 token, got none"),
        ([1, V], {}, r"expected ids in \[0, 26\), got 1 to 26"),
        ([1], {"stop": ("",)}, "stop strings that are not empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            ask(policy, prompt, max_new_tokens=1, **params)  # type: ignore[arg-type]
    assert not server.bodies


def test_the_key_goes_to_the_server_and_nowhere_else(server: Server) -> None:
    with connect(server, api_key="secret-7") as policy:
        assert server.keys == {"Bearer secret-7"}
        server.before = failing(1, lambda handler: handler.reply(401, "unauthorized"))
        with pytest.raises(ServerError) as caught:
            ask(policy, [1], max_new_tokens=1)
    assert "secret" not in f"{caught.value} {caught.value!r} {policy!r}"


def test_httpx_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[server\]'"):
        ServerPolicy("http://127.0.0.1:1/v1", "letters", Letters(), vocab_size=V)


# -- what it is for ----------------------------------------------------------------------------------------------------------------------------------------


def test_a_rollout_branches_over_a_server(policy: ServerPolicy) -> None:
    as_policy: Policy = policy
    assert not isinstance(policy, ServedPolicy)  # no weights can be sent
    settings: dict[str, Any] = {"group_size": 8, "initial": 2, "max_turn_tokens": 6, "max_context": 60, "reserve_tokens": 8, "codec": LetterCodec()}
    env = Talk(lambda turns: "abc", opening="question")
    tree = sample_one(as_policy, env, UniformBranching(), **settings)
    check_tree(tree, size=8, initial=2)
    assert any(trajectory.origin == "branched" for trajectory in tree.trajectories)
    assert all(node.bounds is not None for node in tree.nodes if node.sampled)
    assert sample_one(policy, Talk(lambda turns: "abc", opening="question"), UniformBranching(), **settings).canonical() == tree.canonical()
