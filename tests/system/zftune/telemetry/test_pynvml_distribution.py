"""The deprecated distribution pynvml, whose import hook warns at every `import pynvml`, does no harm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nvml.scripted import HOPPER, Machine

# What the distribution puts into site-packages: a .pth file that imports a hook, which finds nothing but warns.
HOOK = """
import importlib.abc
import sys
import warnings


class Finder(importlib.abc.MetaPathFinder):
    warned = False

    def find_spec(self, name, path, target=None):
        if name.startswith("pynvml") and not self.warned:
            self.warned = True
            warnings.warn("The pynvml package is deprecated.", FutureWarning, stacklevel=2)


sys.meta_path.insert(0, Finder())
"""

# The folder becomes a site directory: its .pth files are read.
PROBE = """
import json, site, sys, time
site.addsitedir({folder!r})
assert any("Finder" in type(finder).__name__ for finder in sys.meta_path), "the hook is not there"
from zftune.telemetry import NvmlSampler, software
sampler = NvmlSampler(rate_hz=10)
begin = time.monotonic_ns()
sampler.start()
time.sleep(0.4)
sampler.stop()
figures, missing = sampler.summary(begin, time.monotonic_ns())
print(json.dumps([figures["devices"], missing, software()["nvidia_driver"]]))
"""


def check(folder: Path, machine: Machine, library: Path) -> None:
    machine.write(HOPPER)
    code = PROBE.format(folder=str(folder))
    assert machine.run(library, code, "-W", "error") == [1, {}, "570.1"]


@pytest.fixture
def imitation(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "_pynvml_hook.py").write_text(HOOK)
    (folder / "_pynvml_hook.pth").write_text("import _pynvml_hook\n")
    return folder


def test_an_imitation_of_the_hook(imitation: Path, machine: Machine, nvml_library: Path) -> None:
    check(imitation, machine, nvml_library)


def test_the_imitation_warns_others(imitation: Path) -> None:
    code = f"import site; site.addsitedir({str(imitation)!r}); import pynvml"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert "FutureWarning: The pynvml package is deprecated." in done.stderr


def test_a_binding_of_before_that_lacks_functions(tmp_path: Path, machine: Machine, nvml_library: Path) -> None:
    """Before version 12 the distribution held a binding of its own, which hides a newer one."""
    package = tmp_path / "site" / "pynvml"
    package.mkdir(parents=True)
    import pynvml

    text = Path(pynvml.__file__).read_text(encoding="utf-8")
    lacking = text.replace("def nvmlGpmQueryDeviceSupport(", "def _gone(")
    assert lacking != text
    (package / "__init__.py").write_text(lacking, encoding="utf-8")
    machine.write(HOPPER)
    code = """
import json, time
from zftune.telemetry import NvmlSampler
sampler = NvmlSampler(rate_hz=10)
begin = time.monotonic_ns()
sampler.start()
time.sleep(0.4)
sampler.stop()
print(json.dumps(sampler.summary(begin, time.monotonic_ns())))
"""
    figures, missing = machine.run(nvml_library, code, PYTHONPATH=str(package.parent))
    assert figures["utilisation_percent"] is not None
    assert missing["dram_percent"] == (
        "the binding has no nvmlGpmQueryDeviceSupport: uninstall pynvml and install nvidia-ml-py again"
    )
