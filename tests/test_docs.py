"""The code of README.md and docs/ runs, page by page, as a reader would type it."""

from __future__ import annotations

import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
from tiny_policy import build_model, build_tokenizer

from arpo_env.envs.world import WorldConfig, world_vocabulary

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model where the pages say ``path/to/model``."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    build_model(tokenizer, hidden=16, layers=2, heads=2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore::arpo_env.sandbox.IsolationWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for number, code in enumerate(blocks(page, "python"), 1):
        code = code.replace("path/to/model", str(model_path))
        exec(compile(code, f"{page.name}, block {number}", "exec"), vars(module))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.name)
def test_the_toml_of_a_page_is_a_valid_configuration(page: Path) -> None:
    from arpo_algo.commands import Rollout, Train
    from arpo_algo.settings import build

    for text in blocks(page, "toml"):
        settings = tomllib.loads(text)
        assert build(Train if "trainer" in settings else Rollout, settings).env.id
