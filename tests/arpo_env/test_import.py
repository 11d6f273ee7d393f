"""``import arpo_env`` needs gymnasium and numpy alone: whatever is heavy or optional is imported by the function that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAZY = (
    "datasets", "ddgs", "e2b", "gem", "httpx", "mcp", "openenv", "pandas", "pyarrow", "pydantic", "pydantic_monty", "reasoning_gym", "skyrl_gym", "sqlite3",
    "ssl", "sympy", "tantivy", "textarena", "torch", "trafilatura", "transformers", "trl", "verifiers",
)  # fmt: skip

PROBE = "import sys, {module}; print('\\n'.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"


def modules_loaded_by(module: str) -> set[str]:
    """Top-level names of the modules in ``sys.modules`` after ``import module`` in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROBE.format(module=module)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(not (ROOT / "arpo_env" / "__init__.py").exists(), reason="arpo_env is no package yet")
def test_import_arpo_env_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("arpo_env")
    assert "arpo_env" in loaded
    assert loaded.isdisjoint(LAZY), f"import arpo_env loads {sorted(loaded & set(LAZY))}"


def test_every_exported_name_is_there() -> None:
    import arpo_env

    for name in arpo_env.__all__:
        assert getattr(arpo_env, name).__name__.rpartition(".")[2] == name or name in {"CallFormat", "TaskSource"}
    with pytest.raises(AttributeError, match="nonsense"):
        arpo_env.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_the_probe_sees_what_an_import_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a package whose import loads sympy is caught."""
    pytest.importorskip("sympy")
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").write_text("import sympy\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert "sympy" in modules_loaded_by("heavy")
