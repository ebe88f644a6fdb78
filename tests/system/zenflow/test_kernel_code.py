"""What the compiler, which needs no GPU, makes of the Triton kernels for one: every operation rounds by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zenflow.kernels.triton_kernels import column_sums, update_columns

POINTERS = {"columns": "*i64", "count": "*i32", "updated": "*i32", "skip": "*i1"}
NUMBERS = ("lr", "decay", "weight_decay", "eps", "mix1", "mix2", "keep")
NOTHING = {"adam": (), "adagrad": ("second", "inverse_root")}
NOTHING |= dict.fromkeys(("lion", "sgd"), ("second", "inverse_root", "rate"))

def ptx(kernel, element, fused, **constants):
    signature, values = {}, {}
    for place, name in enumerate(kernel.arg_names):
        whole = name in ("n", "rows", "part_rows") or "stride" in name
        kind = "i64" if whole else "fp32" if name in NUMBERS else POINTERS.get(name, "*fp32")
        signature[name] = element if name in ("gradient", "weights", "matrix") else kind
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    options = {"enable_fp_fusion": fused}
    return compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]

def update(rule, element, fused=False):
    bf16 = element == "*i16"
    nothing = dict.fromkeys(NOTHING[rule])
    return ptx(
        update_columns, element, fused, RULE=rule, L2=True, NESTEROV=True, GRADIENT_BF16=bf16, WEIGHTS_BF16=bf16,
        GRADIENT_ROWS_FIRST=False, WEIGHTS_ROWS_FIRST=False, BLOCK_N=16, BLOCK_R=32, **nothing,
    )

code = {f"{rule} {element}": update(rule, element) for rule in NOTHING for element in ("*i16", "*fp16")}
code["importance"] = ptx(
    column_sums, "*fp16", False, FINITE=True, BF16=False, ROWS_FIRST=True, BLOCK_N=8, BLOCK_R=32,
)
code["fused"] = update("adam", "*fp32", fused=True)
print(json.dumps(code))
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX by kernel; in a process where Triton compiles, whatever this one does."""
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    script = tmp_path_factory.mktemp("compile") / "script.py"
    script.write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment | {"TRITON_CACHE_DIR": str(Path(script).parent)},
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, str] = json.loads(done.stdout)
    return made


def arithmetic(ptx: str) -> set[str]:
    """The fp32 instructions that round."""
    return set(re.findall(r"\b(?:add|sub|mul|div|sqrt|rcp|fma|mad)\S*\.f32\b", ptx))


def test_every_operation_rounds_to_nearest_by_itself(code: dict[str, str]) -> None:
    alone = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div", "sqrt")}
    fused = code.pop("fused")
    for name, ptx in code.items():
        assert {"mul.rn.f32", "add.rn.f32"} <= arithmetic(ptx) <= alone, name
        assert not re.search(r"\b(?:fma|ftz|approx)\b", ptx), name
    for name in ("adam *i16", "adagrad *fp16"):
        assert {"div.rn.f32", "sqrt.rn.f32"} <= arithmetic(code[name])
    assert any(instruction.startswith("fma") for instruction in arithmetic(fused))  # what is looked for can be there
