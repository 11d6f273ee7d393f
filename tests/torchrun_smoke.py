"""One update on the ranks that torchrun has started; every rank writes what it saw into a folder. Run by tests/arpo_algo/test_distributed.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rank_cases import batch, learner, raised

from arpo_algo.distributed import Ranks


def fail() -> None:
    raise OSError("sampling broke")


def main(folder: Path) -> None:
    ranks = Ranks.current()
    rows = ranks.broadcast_from_main(batch)
    metrics = learner(ranks).update(rows)
    seen = {"size": ranks.size, "opened": ranks.opened, "loss": metrics["loss"], "failure": raised(lambda: ranks.broadcast_from_main(fail))[0]}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.close()
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
