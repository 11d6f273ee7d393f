"""A Python interpreter that forks: state kept between cells, an independent copy in milliseconds.

::

    host --exec--> zygote (imports done, one thread) --fork--> keeper --fork--> worker --fork--> copy --fork--> copy

``Pool`` is the zygote, ``Session`` one interpreter (a worker or a copy); the keeper is above all branches of a session. See ``isolation.py`` for what is
protected from the code that runs in it, and what is not, and ``isolate.py`` for how.
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
