"""How kernels are launched: by Triton's own code, up to a libcuda that only counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = r"""
import ctypes, json, os, re, subprocess, sys
from pathlib import Path
import torch, triton
folder = Path(sys.argv[1])
source = (Path(triton.__file__).parent / "backends/nvidia/driver.c").read_text()
names = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source)) | set(re.findall(r"GetFunctionHandle\(\w+,\s*(\w+)\)", source))
names = sorted(names - {"cuPointerGetAttribute", "cuGetErrorString"} | {"cuLaunchKernel", "cuLaunchKernelEx"})
lines = [
    "typedef unsigned long long Address;",
    "int launches;",
    "int cuPointerGetAttribute(Address *to, int which, Address of) { *to = of; return 0; }",
    'int cuGetErrorString(int error, const char **to) { *to = "stub"; return 0; }',
]
lines += [f"int {name}() {{ {'launches++;' if 'cuLaunchKernel' in name else ''} return 0; }}" for name in names]
(folder / "stub.c").write_text("\n".join(lines))
library = folder / "libcuda.so.1"
command = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, folder / "stub.c"]
subprocess.run(command, check=True)
os.environ.update(TRITON_LIBCUDA_PATH=str(folder), TRITON_CACHE_DIR=str(folder / "cache"))
launches = ctypes.c_int.in_dll(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), "launches")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver, jit
from tests.support.zenflow.triton_driver import NoDriver

class Stub(NoDriver):
    def __init__(self):
        self.utils = nvidia.CudaUtils()
        self.utils.load_binary = lambda *_: (1, 2, 32, 0, 1024)
        self.utils.get_device_properties = lambda _: {"max_shared_mem": 232448, "warpSize": 32}
        self.launcher_cls = nvidia.CudaLauncher

    def map_python_to_cpp_type(self, ty):
        return ty

driver.set_active(Stub())
from zenflow.kernels import triton_kernels
from zenflow.kernels.launcher import Launcher, launcher
from zenflow.kernels.base import DevicePart, DeviceWeight
from zenflow.kernels.tables import BucketTables, TablePart
from zenflow.kernels.triton_launch import TritonKernels
from zenflow.rules import RULES
from zenflow.state import ColumnState

looked = []
run = jit.JITFunction.run
jit.JITFunction.run = lambda self, *args, **kwargs: looked.append(self) or run(self, *args, **kwargs)

def counted(call):
    before, launches.value = len(looked), 0
    call()
    return launches.value, len(looked) - before

def bucket(weights):
    places = torch.arange(-8, 24, dtype=torch.int32)
    parts = [TablePart(16, 32, places, i * 24 * 16, i * 8 * 16) for i in range(weights)]
    return BucketTables(parts, torch.bfloat16, torch.Tensor.clone)

kernels, rule, found = TritonKernels(), RULES["adamw"], {}
hyper = rule.hyper({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})
for weights in (1, 7, 9, 70):
    tables = bucket(weights)
    of = [torch.zeros(16, 32, dtype=torch.bfloat16) for _ in range(weights)]
    sent, flat = torch.zeros(weights * 384, dtype=torch.bfloat16), torch.zeros(weights * 128, dtype=torch.bfloat16)
    columns = torch.arange(8)
    updated = []
    for packed in flat.split(128):
        part = DevicePart(ColumnState(torch.zeros(8, 16), 2), columns, packed.view(8, 16))
        updated.append(DeviceWeight([part], 0, flat.dtype, 32, torch.Tensor.detach, transposed=False))
    updates = kernels.device_updates(rule, updated, torch.Tensor.clone)
    calls = [
        lambda: kernels.pack_bucket(tables, of, sent, flat, torch.zeros(weights * 32)),
        lambda: kernels.show_bucket(tables, of, sent),
        lambda: updates.run(of, [None] * weights, [hyper]),
    ]
    for call in calls:  # compiled
        call()
    found[weights] = [counted(call) for call in calls]

def total(launcher):
    tiles, records = torch.zeros((1, 2), dtype=torch.int32), torch.zeros((1, 8), dtype=torch.int64)
    return lambda: launcher(1, tiles.device, 1, tiles, records, torch.zeros(1), torch.zeros(1))

def made():
    return Launcher(triton_kernels.sum_partials, 4, {"BLOCK_R": 64, "BLOCK_C": 128})

def refuses(*_):
    raise TypeError("function takes exactly 3 arguments")

other = made()
total(other)()
run_, function, metadata = other._started[None]
other._started[None] = refuses, function, metadata
found["other arguments"] = [counted(total(other)), counted(total(other))]
class Compiled:  # of a release that names things otherwise
    pass
other = made()
other.kernel = type("Kernel", (), {
    "warmup": lambda self, *args, **kwargs: Compiled(),
    "__getitem__": lambda self, grid: triton_kernels.sum_partials[grid],
})()
found["other names"] = [counted(total(other)), counted(total(other))]
print(json.dumps(found))
"""


def launched(folder: Path) -> dict[str, list[list[int]]]:
    """Launches, and looks of Triton at a call's arguments, of each call."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.smoke
@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="Triton needs a C compiler and Python's headers",
)
def test_kernels_are_launched_by_what_was_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    found = launched(tmp_path)
    once = [[2, 0], [1, 0], [2, 0]]  # packed and summed; shown; counted and updated
    assert (found["1"], found["7"]) == (once, once), "of 7 weights as many as of one"
    assert (found["9"], found["70"]) == ([[3, 0], [2, 0], [2, 0]], [[11, 0], [9, 0], [2, 0]])
    # Another release of Triton: each launch is made by `kernel[grid]`.
    assert found["other arguments"] == [[1, 1], [1, 1]]
    assert found["other names"] == [[1, 1], [1, 1]]
