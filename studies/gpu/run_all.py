"""What a GPU can tell about this runtime in nine minutes. See the README.md beside.

    python studies/gpu/run_all.py [--out FOLDER] [--minutes 9] [--size 1B] [--parts NAME ...] [--stub]

Needs Python, torch and an NVIDIA GPU, and no network. Each part runs in a process of its own under a time limit, and
what it found is in the folder after every measurement. Ends with 0 where all parts ran and every invariant holds, 1
where one is broken, 2 where the input is bad or there is no GPU, 3 where a part could not run or was cut short.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "studies"), str(ROOT)]
if importlib.util.find_spec("zenflow") is None:
    sys.path.append(str(ROOT / "runtime"))

from gpu.goals import goals  # noqa: E402
from gpu.parts import PARTS, preload, run_part  # noqa: E402
from gpu.record import SIMULATED  # noqa: E402
from gpu.runs import BAD_INPUT, INCOMPLETE, NoGpuHereError, Outcome, Run  # noqa: E402

_LONG = ("doctor", "machine", "model", "search", "output")
"""Figures that are read in the file alone."""
_BUILD_S = 150
_STUB_PATIENCE = 10
"""Times the limits of parts: a machine that tests is busy."""
_SIZES = ("1B", "1B-16k", "3B", "50M", "stub")


def native_module() -> str:
    """See to a native module for this Python, built already or built now; says how."""
    found = importlib.util.find_spec("zenflow")
    assert found is not None
    folder = Path(next(iter(found.submodule_search_locations or ())))
    endings = importlib.machinery.EXTENSION_SUFFIXES
    if any((folder / f"_native{ending}").is_file() for ending in endings):
        return "native module: there"
    for ending in endings:
        for module in sorted((ROOT / "build").glob(f"cp3*/**/_native{ending}")):
            shutil.copy(module, folder / module.name)
            return "native module: built beforehand"
    return _built(folder)


def _built(folder: Path) -> str:
    none = "PyTorch does the host's work, whose figures say nothing then"
    if importlib.util.find_spec("nanobind") is None or shutil.which("cmake") is None:
        return f"native module: none (nanobind or CMake is missing), {none}"
    import nanobind  # type: ignore[import-untyped]

    build = ROOT / "build" / "gpu"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    for command in (configure, ["cmake", "--build", str(build), "--parallel", "--target", "_native"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_S)
        except subprocess.TimeoutExpired:
            return f"native module: not built within {_BUILD_S} s, {none}"
        if done.returncode:
            return f"native module: not built ({done.stderr.strip().splitlines()[-1:]}), {none}"
    for module in build.glob("**/_native*.so"):
        shutil.copy(module, folder / module.name)
    return "native module: built now"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    size = arguments.size or ("stub" if arguments.stub else "1B")
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g} must be above 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INCOMPLETE))
    _prepare_environment()

    def work(name: str, path: Path, limit_s: float) -> int:
        return run_part(name, path, size=size, stub=arguments.stub, limit_s=limit_s)

    run = Run(arguments.out, arguments.minutes, work, simulated=arguments.stub)
    if arguments.stub:
        print(SIMULATED)
    how = native_module()
    print(how, flush=True)
    run.say("native", how)
    preload(stub=arguments.stub)
    wanted = arguments.parts or [part.name for part in PARTS]
    patience = _STUB_PATIENCE if arguments.stub else 1
    try:
        for part in PARTS:
            if part.name in wanted:
                print(line(run.take(replace(part, limit_s=patience * part.limit_s))), flush=True)
                print("\n".join(figures_of(part.name, run.figures().get(part.name, {}))), flush=True)
    except NoGpuHereError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    finally:
        run.end_process()
    run.keep(goals=[goal.document() for goal in goals(run.figures(), simulated=run.simulated)])
    print("\n".join(tables(run)))
    return run.code


def _prepare_environment() -> None:
    """For the parts, and what they start."""
    # torch looks for a GPU without making CUDA begin, which no process that is forked later could use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Kernels that a part compiles are there for the later ones, and can be carried to another machine.
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))
    paths = [*sys.path[:2], *(path for path in sys.path if path == str(ROOT / "runtime"))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def line(outcome: Outcome) -> str:
    """A part for a terminal, with what is wrong below it."""
    first = f"{outcome.part:24} {outcome.status:13} {outcome.seconds:6.1f} s  {outcome.reason or ''}".rstrip()
    more = [f"    broken: {name}" for name in outcome.broken]
    more += [f"    failed: {name}: {error}" for name, error in outcome.failed.items()]
    more += [f"    absent: {name}: {reason}" for name, reason in outcome.absent.items()]
    return "\n".join([first, *more])


def figures_of(part: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What a part measured, for a terminal: a system's steps in a line, of the others each measurement."""
    if "first_step_s" not in found:
        for name, figure in found.items():
            if name not in _LONG:
                yield f"    {name}: {_short(figure)}"
    elif step := found.get("step_ms"):
        said, stall = found.get("prediction") or {}, found.get("stall")
        text = f"  {part:24} p50 {step['p50']:8.1f} ms, p95 {step['p95']:8.1f}, first {found['first_step_s']:.1f} s"
        text += "" if stall is None else f", stall {stall['share']:.1%}"
        yield text + (f", planned {said['step_ms']:.1f} ms" if said else "")


def _short(figure: Any) -> str:
    if isinstance(figure, float):
        return f"{figure:.4g}"
    if isinstance(figure, Mapping):
        return ", ".join(f"{name} {_short(each)}" for name, each in figure.items() if name not in _LONG)
    return str(figure)


def tables(run: Run) -> Iterator[str]:
    """The systems beside each other, and the goals."""
    marked = f" ({SIMULATED})" if run.simulated else ""
    figures = run.figures()
    yield f"\nSteps{marked}"
    for part, found in figures.items():
        if "first_step_s" in found:
            yield from figures_of(part, found)
    yield f"\nGoals{marked}"
    for goal in goals(figures, simulated=run.simulated):
        verdict = "-" if goal.met is None else "met" if goal.met else "missed"
        yield f"  {goal.name:52} {goal.wanted:18} {goal.measured:32} {verdict}"
    others = ", ".join(f"{each.part} {each.status}" for each in run.outcomes if each.status != "done")
    yield f"\nResults in {run.folder}: {others or 'all parts ran'}"


def _parser() -> argparse.ArgumentParser:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description="What a GPU can tell about this runtime in nine minutes.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-results", help="where results are kept")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; the last parts get what is left")
    parser.add_argument("--size", choices=_SIZES, help="of the decoder; 1B, with --stub a tiny one; 16k: tokens a step")
    parser.add_argument("--parts", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--stub", action="store_true", help="the simulated device for a GPU: no figure is one of a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
