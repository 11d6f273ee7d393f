"""How the guest side is started: command and environment. Host side."""

from __future__ import annotations

import os
import sys

from .isolation import IsolationError

_ROOT = os.path.dirname(os.path.abspath(__file__))
_BOOT = (
    "import sys, types; package = types.ModuleType('arpo_sandbox'); package.__path__ = [sys.argv[1]]; sys.modules['arpo_sandbox'] = package; "
    "from arpo_sandbox.zygote import main; main(int(sys.argv[2]))"
)


def command(control: int) -> list[str]:
    """The command that starts a zygote on the socket ``control`` under this interpreter, with this directory as a package and without the rest of
    ``arpo_env``.

    ``-s -P`` and the clean environment give what ``-I`` gives, and leave PYTHONHASHSEED in force: sets print in the same order in every run.
    """
    if not sys.executable:
        raise IsolationError("sys.executable is empty: the sandbox needs a Python interpreter to start")
    return [sys.executable, "-s", "-P", "-c", _BOOT, _ROOT, str(control)]


def environment() -> dict[str, str]:
    """The whole environment of the guest: nothing of the host's, so no keys and tokens, but where its libraries lie."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # a process that forks has one thread
    python = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "MPLBACKEND": "Agg", **kept, **threads, **python}
