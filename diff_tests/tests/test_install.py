"""Installing the package beside a vLLM leaves every package there as it is."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("uv") is None, reason="asks uv what an installation would change")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM is installed in this environment")
def test_installing_changes_no_package_that_is_there():
    asked = subprocess.run(
        ["uv", "pip", "install", "--dry-run", "--reinstall-package", "kvoracle", "--python", sys.executable, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    changed = set(re.findall(r"^ [-+~] (\S+)", asked.stderr, flags=re.MULTILINE))
    assert {name.partition("==")[0] for name in changed} == {"kvoracle"}


def test_the_model_needs_neither_torch_nor_vllm():
    code = "import sys, sim.simulator, sim.startup; print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert asked.stdout.strip() == "set()"
