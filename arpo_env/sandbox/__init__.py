"""A Python interpreter that forks: state kept between cells, an independent copy in milliseconds.

::

    host --exec--> zygote (imports done, one thread) --fork--> session --fork--> copy --fork--> copy

``Pool`` is the zygote, ``Session`` one interpreter. See ``isolation.py`` for what is protected from the code that runs in it, and what is not.
"""

from .isolation import ForkRefused, IsolationError, IsolationReport, IsolationWarning, SandboxError, SessionLost, probe
from .limits import Limits
from .pool import Pool, close_pools, shared_pool
from .session import ForkableSession, Session
from .watch import CellResult

__all__ = [
    "CellResult",
    "ForkRefused",
    "ForkableSession",
    "IsolationError",
    "IsolationReport",
    "IsolationWarning",
    "Limits",
    "Pool",
    "SandboxError",
    "Session",
    "SessionLost",
    "close_pools",
    "probe",
    "shared_pool",
]
