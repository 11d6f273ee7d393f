"""Working with a library that is not ours: importing it, naming what is missing, and keeping its draws from the process-wide generators apart."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_PROCESS_WIDE = threading.RLock()
"""Held while the process-wide generators are those of one environment. One for all libraries, because there is one ``random``."""


class ProcessGenerators:
    """The states of ``random`` and ``numpy.random`` as one environment sees them. A deepcopy is independent and starts from the same states."""

    def __init__(self, seed: int = 0) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start both from ``seed`` (numpy from its lower 32 bits)."""
        numpy_state = np.random.RandomState(seed % 2**32).get_state()
        self._states: tuple[Any, Any] = (random.Random(seed).getstate(), numpy_state)

    @contextlib.contextmanager
    def in_force(self, *, numpy: bool = True) -> Iterator[None]:
        """Within, the process-wide generators go on from these states; afterwards they are as they were. Other environments wait, also for a call that hangs.

        ``numpy=False`` leaves ``numpy.random`` out, whose state costs some ten times as much to put in place, for code that does not draw from it.
        """
        with _PROCESS_WIDE:
            outside = _get(numpy)
            _set(*self._states if numpy else (self._states[0], None))
            try:
                yield
            finally:
                python_state, numpy_state = _get(numpy)
                self._states = (python_state, numpy_state or self._states[1])
                _set(*outside)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGenerators:
        twin = object.__new__(type(self))
        twin._states = self._states  # replaced as a whole, never written to
        return twin


def _get(numpy: bool) -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state() if numpy else None


def _set(python_state: Any, numpy_state: Any) -> None:
    random.setstate(python_state)
    if numpy_state is not None:
        np.random.set_state(numpy_state)


def uses_numpy(part: object) -> bool:
    """Whether the module in which the class of ``part`` is defined imports numpy: it may then draw from ``numpy.random``."""
    return bool({"np", "numpy"} & set(vars(sys.modules[type(part).__module__])))


def defined_in(part: object, modules: tuple[str, ...]) -> bool:
    """Whether the class of ``part`` is defined in one of the modules, or in a module of one of the packages."""
    return f"{type(part).__module__}.".startswith(tuple(f"{module}." for module in modules))


def load(module: str, extra: str) -> Any:
    """The module. ``ImportError`` names the extra to install; handlers that its import puts on the root logger are taken off again."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with _without_warnings():
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install 'arpo[{extra}]'") from error
    finally:
        root.handlers[:], root.level = handlers, level


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """What a library's own source warns of while it is compiled and imported is not the user's to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_known(name: str, known: Iterable[str], library: str) -> None:
    """``ValueError`` with suggestions where ``library`` has no environment ``name``."""
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        raise ValueError(f"{library} has no environment {name!r}{f'; did you mean {close}?' if close else ''}")


@contextlib.contextmanager
def making(what: str) -> Iterator[None]:
    """Around the construction of a library's environment: says in one line what cannot be made and what it lacks.

    ``ImportError`` for a missing package, ``FileNotFoundError`` for missing data, ``ValueError`` for all else but ``TypeError``.
    """
    try:
        with _without_warnings():  # many games are imported only now
            yield
    except ImportError as error:
        raise ImportError(f"{what} needs something that cannot be imported: {error}") from error
    except TypeError as error:
        raise TypeError(f"{what} cannot be made: {error}") from error
    except OSError as error:
        raise FileNotFoundError(f"{what} needs data that is not here: {type(error).__name__}: {error}") from error
    except LookupError as error:
        missing = "NLTK" in str(error) or "nltk" in str(error)
        if not missing:
            raise ValueError(f"{what} cannot be made: {type(error).__name__}: {error}") from error
        raise FileNotFoundError(
            f"{what} needs word lists of NLTK, which it tries to download: python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from error
    except Exception as error:
        raise ValueError(f"{what} cannot be made: {type(error).__name__}: {error}") from error
