"""The settings of a run on a cluster, which need no Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from arpo_algo.cluster.settings import RaySettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engines": 0}, "engines must be at least 1, got 0"),
        ({"learners": -1}, "learners must be at least 1, got -1"),
        ({"engine_gpus": -0.5}, "engine_gpus must be at least 0, got -0.5"),
        ({"learner_gpus": 2}, "learner_gpus must be 0 or 1, got 2"),
        ({"start_timeout": 0}, "start_timeout must be greater than 0, got 0"),
        ({"object_store_mib": 0}, "object_store_mib must be at least 1, got 0"),
        ({"address": "auto", "local_cpus": 4}, "for a cluster started here, not for one that is joined"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaySettings(**values)


def test_requests_are_under_the_names_of_the_cluster() -> None:
    settings = RaySettings(engine_gpus=2, engine_resources={"h100": 1}, env_cpus=0.5, learner_gpus=1)
    assert settings.engine_request == {"CPU": 1, "GPU": 2, "h100": 1}
    assert settings.env_request == {"CPU": 0.5}
    assert settings.learner_request == {"CPU": 1, "GPU": 1}


def test_without_ray_the_error_names_the_extra_and_the_settings_still_load() -> None:
    code = """
import sys
sys.modules["ray"] = None
from arpo_algo.cluster.settings import RaySettings
RaySettings()
try:
    import arpo_algo.cluster.launch
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "training on a cluster needs Ray: pip install 'arpo[ray]'\n"


def test_importing_the_package_loads_no_ray() -> None:
    code = "import sys, arpo_algo, arpo_algo.cluster.settings; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "False\n"
