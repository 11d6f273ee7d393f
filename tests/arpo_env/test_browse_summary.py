"""Question-focused reading: the answers of a second policy, and a model behind an HTTP interface as one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browse_fakes import good, make

from arpo_env.tools.base import check_arguments
from arpo_env.tools.browse import ChatEndpoint, Extractor
from arpo_env.tools.cache import ToolCache


@pytest.fixture(scope="module")
def extractor() -> Iterator[Extractor]:
    """One for all tests: a worker takes a moment to start."""
    extractor = Extractor(main_text=False, timeout=60.0)
    yield extractor
    extractor.close()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ToolCache]:
    cache = ToolCache(tmp_path / "cache.sqlite")
    yield cache
    cache.close()


class Scripted:
    """A second policy that gives ``answers`` in turn and raises those that are exceptions."""

    def __init__(self, *answers: Any):
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    def __call__(self, question: str, text: str) -> str:
        self.asked.append((question, text))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_answer_in_place_of_the_text(extractor: Extractor) -> None:
    reader = Scripted("42 rivers", "43", "44")
    tool = make(extractor, summarize=reader).bind()
    result = good(tool, url="example.org", question="how many?")
    assert result.text.startswith("Title: Start\nURL: https://example.org/\n\n42 rivers\n\n[Another model's answer from this document. ")
    assert "43" in good(tool, url="example.org\nhow\nmany?").text, "a format with one argument puts the question on the next lines"
    assert reader.asked == [("how many?", "Hello. See the long one or another.")] * 2
    assert good(tool, url="example.org").text.endswith("Hello. See the long one or another."), "without a question the text"
    assert len(reader.asked) == 2


def test_a_long_document_is_shown_from_the_page_asked_for(extractor: Extractor) -> None:
    reader = Scripted("a", "b")
    tool = make(extractor, summarize=reader, summarize_chars=1500).bind()
    assert "(from 1,500 of 3,268 characters, beginning at page 1)" in good(tool, url="example.org/long", question="q").text
    good(tool, url="page 4", question="q")
    assert len(reader.asked[0][1]) == 1500
    assert reader.asked[0][1].startswith("Paragraph 0 ") and reader.asked[1][1].endswith("word") and "Paragraph 0 " not in reader.asked[1][1]


@pytest.mark.parametrize(("answer", "words"), [(OSError("refused"), "OSError"), (" ", "nothing"), (None, "NoneType"), (SystemError("x"), "SystemError")])
def test_where_it_fails_the_text_is_shown_with_a_note(extractor: Extractor, answer: Any, words: str) -> None:
    tool = make(extractor, summarize=Scripted(answer)).bind()
    result = good(tool, url="example.org", question="q")
    assert result.text.startswith("[The question could not be answered (") and words in result.text.splitlines()[0]
    assert result.text.endswith("Hello. See the long one or another.")


def test_it_stands_under_a_deadline(extractor: Extractor) -> None:
    hang = threading.Event()
    tool = make(extractor, summarize=lambda question, text: str(hang.wait(60)), summarize_timeout=0.1).bind()
    assert "DeadlineExceeded" in good(tool, url="example.org", question="q").text
    hang.set()


def test_answers_are_cached_and_failures_of_it_are_not(extractor: Extractor, cache: ToolCache) -> None:
    reader = Scripted(OSError("down"), "fine", "other page")
    tool = make(extractor, summarize=reader, cache=cache)
    texts = [good(tool.bind(), url="example.org", question="q").text for _ in range(3)]
    assert "could not be answered" in texts[0] and "fine" in texts[1] and texts[2] == texts[1]
    assert "other page" in good(tool.bind(), url="example.org/long", question="q").text
    assert len(reader.asked) == 3


def test_the_question_is_offered_only_where_it_can_be_answered(extractor: Extractor) -> None:
    without, with_it = make(extractor), make(extractor, summarize=Scripted())
    assert check_arguments(without, {"url": "x", "question": "q"}) is not None
    assert check_arguments(with_it, {"url": "x", "question": "q"}) is None
    assert "question" in with_it.description and "question" not in without.description
    assert with_it.timeout is not None and without.timeout is not None and with_it.timeout == without.timeout + 30.0


def chat_server(answer: bytes, status: int = 200) -> tuple[ThreadingHTTPServer, list[tuple[str, str | None, Any]]]:
    asked: list[tuple[str, str | None, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server, asked


def test_a_chat_endpoint() -> None:
    server, asked = chat_server(json.dumps({"choices": [{"message": {"content": "In 1889."}}]}).encode())
    endpoint = ChatEndpoint(f"http://127.0.0.1:{server.server_port}/v1/", "tiny", api_key="secret-key", instruction="{question} <- {text}")
    assert endpoint("when {text}?", "built {question} 1889") == "In 1889."
    server.shutdown()
    server.server_close()
    path, key, body = asked[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret-key", "tiny", 0.0)
    assert body["messages"] == [{"role": "user", "content": "when {text}? <- built {question} 1889"}]
    assert "secret-key" not in repr(endpoint) + str(endpoint.settings())


@pytest.mark.parametrize(
    ("answer", "status"), [(b"{}", 200), (b"[]", 200), (b"no json", 200), (b'{"choices": [{"message": {"content": null}}]}', 200), (b"{}", 500)]
)
def test_a_chat_endpoint_that_fails_raises(answer: bytes, status: int) -> None:
    server, _ = chat_server(answer, status)
    with pytest.raises((OSError, ValueError)) as caught:
        ChatEndpoint(f"http://127.0.0.1:{server.server_port}/v1", "tiny")("q", "t")
    if status != 200:
        caught.value.close()  # type: ignore[attr-defined]  # an HTTPError holds the connection
    server.shutdown()
    server.server_close()


def test_a_chat_endpoint_is_checked() -> None:
    for url, instruction in (("localhost:8000", "{question} {text}"), ("http://localhost", "{question}")):
        with pytest.raises(ValueError, match="must"):
            ChatEndpoint(url, "tiny", instruction=instruction)
