"""What a worker process of :mod:`arpo_env.math_grading` runs: math-verify on one pair after another, in the protocol of ``_workers.py``.

Run as a script. It imports the standard library and math-verify alone, ends when its standard input closes, and ends itself by an alarm should the parent be
gone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def _compare(prediction: str, truth: str) -> bool | None:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig()]
    unlimited: Any = None  # math-verify's annotation forgets that None is allowed
    gold, guess = (parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=unlimited) for text in (truth, prediction))
    if not gold or not guess:
        return None
    equal = verify(gold, guess, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)
    return bool(equal) and ("%" in prediction + truth or not _far_apart(gold[0], guess[0]))


def _far_apart(a: Any, b: Any) -> bool:
    """Two numbers that differ by more than 1 in 10,000: math-verify rounds to six decimals, which makes all tiny numbers equal."""
    from sympy import Expr

    if not all(isinstance(x, Expr) and x.is_number and x.is_finite for x in (a, b)):
        return False
    x, y = a.evalf(30), b.evalf(30)
    return bool(abs(x - y) > 1e-4 * max(abs(x), abs(y)))


def _serve() -> None:
    """Answer pairs until standard input closes. Whatever a library prints goes nowhere."""
    import logging
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _compare("1", "1")  # imports, and builds the parser's tables
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prediction, truth = request["pair"]
        signal.alarm(int(request["seconds"]) + 10)
        try:
            verdict = _compare(prediction, truth)
        except MemoryError:
            os._exit(1)
        except Exception:  # any fault of the libraries' on this pair: the pair is unreadable
            verdict = None
        signal.alarm(0)
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    _serve()
