"""``TantivyIndex``: one's own documents searched by tantivy (extra ``search``), built once on disk, memory-mapped, shared by processes."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arpo_env.tools.search_index import Document, Fingerprint, SearchHit, fingerprint_of, hit_of, read_documents, words_of

_LAYOUT = 1
"""Raised when fields or ranking change: an index of another layout is built anew."""
_LABEL = "arpo_index.json"


@dataclass(frozen=True, slots=True)
class _Label:
    """What lies beside the index on disk and says what it holds."""

    layout: int
    documents: int
    fingerprint: str
    tantivy: str


class TantivyIndex:
    """BM25 by tantivy (``pip install 'arpo[search]'``): 200,000 documents in milliseconds a query. Make one with :meth:`build`, :meth:`open` or
    :meth:`open_or_build`.

    Queries are read as words, any of which may match; quotes, colons, signs and ``AND``/``OR``/``NOT`` have no meaning, so no query is malformed.
    Equal scores: in the order of the documents. Safe in threads and after ``os.fork``. On disk it is memory-mapped, so that processes share its pages, and
    a pickle holds its path alone.
    """

    def __init__(self, index: Any, path: str | None, label: _Label):
        self._index, self._path, self._label = index, path, label
        self._searcher = index.searcher()
        self._settings = {"backend": "tantivy", **asdict(label)}

    @classmethod
    def build(cls, documents: Iterable[Mapping[str, Any] | Document], path: str | os.PathLike[str] | None = None) -> TantivyIndex:
        """An index of ``documents``, in memory, or on disk in the directory ``path``, which must be new or empty (``FileExistsError``).

        All or nothing: it is written beside ``path`` (as ``.NAME.building-*``, which a killed build leaves behind) and moved there when it is whole.
        """
        if path is None:
            index, label = _fill(documents, None)
            return cls(index, None, label)
        where = Path(os.path.abspath(path))
        if where.exists() and (not where.is_dir() or any(where.iterdir())):
            raise FileExistsError(f"{str(where)!r} is not empty: an index is built into a new directory; use TantivyIndex.open to read one")
        where.parent.mkdir(parents=True, exist_ok=True)
        building = where.with_name(f".{where.name}.building-{uuid.uuid4().hex}")
        building.mkdir()
        try:
            _, label = _fill(documents, building)
            (building / _LABEL).write_text(json.dumps(asdict(label)))
            os.rename(building, where)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return cls.open(where)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, documents: Iterable[Mapping[str, Any] | Document] | None = None) -> TantivyIndex:
        """The index that :meth:`build` wrote to ``path``. ``FileNotFoundError`` when there is none; ``ValueError`` when it is of another layout or library,
        damaged, or, where ``documents`` are given, built from others."""
        fingerprint = None if documents is None else fingerprint_of(read_documents(documents))
        return _open(cls, os.path.abspath(path), fingerprint)

    @classmethod
    def open_or_build(cls, documents: Iterable[Mapping[str, Any] | Document], path: str | os.PathLike[str]) -> TantivyIndex:
        """The index of ``documents`` at ``path``, built when there is none. ``ValueError`` when there is one of other documents: it is left as it is.

        Processes may do this at the same time: one index stays. ``documents`` must be readable twice, a list rather than a generator.
        """
        where = os.path.abspath(path)
        if iter(documents) is documents:
            raise TypeError(f"documents are read twice, once to compare and once to build: expected a list, got the iterator {documents!r:.80}")
        if not os.path.isdir(where) or not os.listdir(where):
            try:
                return cls.build(documents, where)
            except FileExistsError:
                pass  # another process was here first
            except OSError:
                if not os.path.exists(os.path.join(where, _LABEL)):
                    raise
        return cls.open(where, documents=documents)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` documents that share a word with ``query``."""
        plain = " ".join(words_of(query))
        if not plain or k < 1:
            return []
        parsed, _ = self._index.parse_query_lenient(plain, ["title", "text"])
        hits = self._searcher.search(parsed, limit=2 * k + 10, count=False).hits  # more than k: ties at the edge are settled below
        last = hits[min(k, len(hits)) - 1][0] if hits else 0.0
        found = []
        for score, address in hits:
            if score >= last:  # reading a document takes as long as finding it
                fields = self._searcher.doc(address).to_dict()
                found.append((-score, fields["position"][0], fields))
        found.sort(key=lambda item: item[:2])
        documents = ((Document(*(fields[name][0] for name in ("text", "title", "url"))), -minus) for minus, _, fields in found[:k])
        return [hit_of(document, score, rank, "tantivy") for rank, (document, score) in enumerate(documents, 1)]

    def settings(self) -> Mapping[str, Any]:
        """The kind of index, its layout, the number and the fingerprint of its documents, and the version of tantivy that built it."""
        return self._settings

    def __deepcopy__(self, memo: dict[int, Any]) -> TantivyIndex:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            raise TypeError("an index in memory cannot be pickled; build it into a directory, then it is opened anew on the other side")
        return _open, (type(self), self._path, self._label.fingerprint)


def _fill(documents: Iterable[Mapping[str, Any] | Document], path: Path | None) -> tuple[Any, _Label]:
    """The index with ``documents`` in it, in memory or in the empty directory ``path``, and its label."""
    tantivy = _tantivy()
    builder = tantivy.SchemaBuilder()
    for name in ("title", "text"):
        builder.add_text_field(name, stored=True)
    builder.add_text_field("url", stored=True, tokenizer_name="raw")
    builder.add_unsigned_field("position", stored=True)
    index = tantivy.Index(builder.build(), path=None if path is None else str(path))
    writer = index.writer(num_threads=1)  # with two threads, equal scores come in another order in every build
    fingerprint, count = Fingerprint(), 0
    try:
        for position, document in enumerate(read_documents(documents)):
            writer.add_document(tantivy.Document(title=document.title, text=document.text, url=document.url, position=position))
            fingerprint.add(document.title, document.text, document.url)
            count = position + 1
        writer.commit()
    finally:
        writer.wait_merging_threads()  # until then it writes into the directory, also into one that is being removed
    index.reload()
    return index, _Label(layout=_LAYOUT, documents=count, fingerprint=str(fingerprint), tantivy=tantivy.__version__)


def _open(kind: type[TantivyIndex], path: str, fingerprint: str | None) -> TantivyIndex:
    """The index at ``path``, of documents with ``fingerprint``."""
    tantivy = _tantivy()
    if not os.path.isdir(path) or not (os.path.exists(os.path.join(path, _LABEL)) or tantivy.Index.exists(path)):
        raise FileNotFoundError(f"no tantivy index in {path!r}; make one with TantivyIndex.build(documents, path)")
    label = _read_label(path)
    if fingerprint is not None and label.fingerprint != fingerprint:
        raise ValueError(f"the index in {path!r} was built from {label.documents} other documents; build one of these into another directory")
    try:
        index = kind(tantivy.Index.open(path), path, label)
    except Exception as error:
        raise ValueError(
            f"the index in {path!r} cannot be opened by tantivy {tantivy.__version__} (it was built by {label.tantivy}); build it anew: {error}"
        ) from error
    if len(index) != label.documents:
        raise ValueError(f"the index in {path!r} is damaged: it holds {len(index)} documents, its label says {label.documents}; build it anew")
    return index


def _read_label(path: str) -> _Label:
    try:
        label = _Label(**json.loads(Path(path, _LABEL).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"the index in {path!r} was not built by TantivyIndex.build, or by another version of it; build it anew: {error}") from error
    if label.layout != _LAYOUT:
        raise ValueError(f"the index in {path!r} has layout {label.layout}, expected {_LAYOUT}; build it anew")
    return label


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise ImportError("TantivyIndex needs tantivy: pip install 'arpo[search]' (KeywordIndex needs nothing)") from error
    return tantivy
