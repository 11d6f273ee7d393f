"""The code of docs/serving.md that needs vLLM runs as a reader would type it."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

from tiny_policy import build_model, build_tokenizer

from arpo_env.envs.world import WorldConfig, world_vocabulary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def test_the_page_trains_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    build_model(tokenizer, hidden=64, layers=2, heads=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python vllm\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(code.replace("path/to/model", str(tmp_path / "model")), PAGE.name, "exec"), {"__name__": "page"})
    assert len((tmp_path / "runs" / "vllm" / "metrics.jsonl").read_text().splitlines()) == 2
