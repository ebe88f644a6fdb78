"""What the compiler, which needs no GPU, makes of the kernels over buckets: every tile that ships compiles.

If sizes and starts allow it, all of a bucket crosses memory in pieces of 16 bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import fast

COMPILE = """
import json, re, subprocess, sys, tempfile
from collections import Counter
from itertools import product
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zenflow.kernels import triton_kernels as kernels
from zenflow.kernels.triton_launch import COUNT_BLOCK, KEPT_TILES, PACK_TILES, SHOW_TILES, SIGN_TILES, narrow_tile

KINDS = {
    "records": "*i64", "reached": "*i64", "wide": "*fp64", "powers": "*fp64", "skip": "*i1",
    "present": "i64", "last": "i64",
    **{f"a{i}": "i64" for i in range(8)},
    **dict.fromkeys(("tiles", "places", "updated"), "*i32"), "signs": "*u8",
}
OF_ELEMENT = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

def compiled(kernel, capability, fused=False, **constants):
    signature = {}
    for name in kernel.arg_names:
        kind = KINDS.get(name, "*fp32")
        if name in ("sent", "kept", "arrived"):
            kind = OF_ELEMENT[constants["ELEMENT"]]
        signature[name] = "constexpr" if name in constants else kind
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": fused})

def registers(made):
    if not OBJDUMP.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [OBJDUMP, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"REG:(\\d+)", done.stdout)
    return found and int(found.group(1))

def variants(everything):
    elements = OF_ELEMENT if everything else ["bf16"]
    rules = ["adam", "adagrad", "lion", "sgd"] if everything and CAPABILITY == 90 else ["adam"]
    for element, transposed, even in product(elements, (False, True), (True, False)):
        if not everything and (transposed or not even):
            continue
        common = {"ELEMENT": element, "EVEN": even, "TRANSPOSED": transposed}
        for kernel, tiles, more in (
            (kernels.pack_bucket, PACK_TILES, {"SIGNS": False}),
            (kernels.pack_bucket, SIGN_TILES, {"SIGNS": True}),
            (kernels.show_bucket, SHOW_TILES, {}),
            (kernels.guess_columns, SHOW_TILES, {}),
        ):
            tile = tiles[element == "fp32", transposed]
            for block_r, block_c in {tile, tile if even else narrow_tile(*tile)}:
                yield kernel, {**common, "BLOCK_R": block_r, "BLOCK_C": block_c, **more}
                if even and element == "bf16":
                    yield kernels.sum_partials, {"BLOCK_R": block_r, "BLOCK_C": block_c}
        for rule in rules:
            block_n, block_r = KEPT_TILES[transposed]
            constants = {"RULE": rule, "L2": element != "bf16", "BLOCK_N": block_n, "BLOCK_R": block_r}
            yield kernels.update_kept, {**common, **constants}
    for rule in rules:
        yield kernels.count_kept, {"RULE": rule, "BLOCK": COUNT_BLOCK}

FUSED = {"RULE": "adam", "L2": True, "ELEMENT": "fp32", "EVEN": True, "TRANSPOSED": True, "BLOCK_N": 4, "BLOCK_R": 256}

FORBIDDEN = r"\\b(?:fma|approx|full|ftz|atom|red)\\b"
found = []
for kernel, constants in variants(EVERYTHING):
    made = compiled(kernel, CAPABILITY, **constants)
    assert made.asm["cubin"]
    ptx = made.asm["ptx"]
    memory = Counter(re.findall(r"\\b((?:ld|st)\\.global\\S*?\\.(?:v\\d\\.)?[bu]\\d+)", ptx))
    constants["kernel"] = kernel.__name__
    found.append([constants, memory, registers(made), bool(re.search(FORBIDDEN, ptx))])
assert re.search(FORBIDDEN, compiled(kernels.update_kept, CAPABILITY, fused=True, **FUSED).asm["ptx"])  # can be there
print(json.dumps(found))
"""


def made(
    folder: Path, capability: int, *, everything: bool
) -> list[tuple[dict[str, object], dict[str, int], int | None, bool]]:
    """Of each variant its constants, memory instructions, registers, and whether it has instructions it must not have.

    In a process where Triton compiles, whatever this one does.
    """
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    script = folder / "script.py"
    head = f"CAPABILITY, EVERYTHING = {capability}, {everything}\n"
    script.write_text(head + COMPILE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@pytest.mark.smoke
@pytest.mark.parametrize("capability", fast([90], all_of=[80, 90, 100]))
def test_every_tile_compiles_and_even_ones_cross_memory_in_pieces_of_16_bytes(tmp_path: Path, capability: int) -> None:
    found = made(tmp_path, capability, everything=fast(False, all_of=True))
    assert len(found) >= fast(5, all_of=38)
    narrow = set()
    for constants, memory, registers, forbidden in found:
        about = f"{constants} {memory} {registers}"
        assert not forbidden, about
        wide = {kind: memory.get(f"{kind}.global.v4.b32", 0) for kind in ("ld", "st")}
        twos = {kind: memory.get(f"{kind}.global.b16", 0) for kind in ("ld", "st")}
        if not constants.get("EVEN"):
            narrow.add(bool(twos["ld"]))
            continue
        updates = constants["kernel"] == "update_kept"
        assert registers is None or registers <= (112 if updates else 96), about
        scattered = updates and not constants["TRANSPOSED"] and constants["ELEMENT"] != "fp32"  # kept columns of a row
        assert twos == {"ld": 0, "st": 8 if scattered else 0}, about
        words = 2 if constants["ELEMENT"] == "fp32" else 1  # pieces of 8 elements, which a thread has of each stream
        if updates:
            state = 2 * (3 if constants["RULE"] == "adam" else 2)
            wanted = {"ld": state + words, "st": state + (words if constants["TRANSPOSED"] else 0)}
        else:  # 8 pieces a thread; between columns that arrive, what was there is read, too
            merges = constants["kernel"] == "show_bucket" and not constants["TRANSPOSED"]
            pieces = 4 if constants.get("SIGNS") else 8
            wanted = {"ld": 16 if merges else pieces, "st": pieces}
        assert wide == wanted, about
    assert narrow == fast({False}, all_of={False, True})  # the instruction that is looked for can be there
