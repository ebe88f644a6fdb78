"""Found by Python before any other `sitecustomize`: arms what is asked for, and runs the next one.

`zftune profile` and its like ask for a recording, which begins once torch is imported; `zftune run` for the backends of
DeepSpeed, once that is imported, and for knobs of zenflow's optimizers, once zenflow is.

Standard library only, syntax of Python 3.6: any interpreter may come across it. It never raises on its own account.
"""

import atexit
import contextlib
import importlib
import os
import sys
from typing import Any, Callable  # noqa: UP035 - of Python 3.6

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - every start of an interpreter comes by here
FOLDER = os.environ.get("ZFTUNE_AGENT_DIR", "")
VERSION = os.environ.get("ZFTUNE_AGENT_VERSION", "")
RUN = os.environ.get("ZFTUNE_RUN", "")
TOP = os.environ.get("ZFTUNE_RUN_TOP", "")
NOTHING = "zftune: no call of deepspeed.initialize came, so nothing was changed: %s\n"
NOT_STEERED = "zftune: %s: no zenflow optimizer took a step; %s\n"
GOES_ON = (
    "zftune: CMD has ended, and what it started goes on in the background: what zftune does there is said in its own "
    "output\n"
)
NO_PYTHON = (
    "CMD started no Python that takes up zftune (a wrapper may clear PYTHONPATH, python -I and -E ignore it): write "
    "zftune run within the wrapper, before python"
)
NO_TORCH = "no Python of CMD imported torch or deepspeed"
NO_ZFTUNE = "the Python that imported torch has no zftune, install it there"
ONE_LINE = "optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-3, module=model)"
OF_TRAINER = (
    "give the Trainer one: optimizers=(zenflow_optimizer(model, args), None), from zftune.integrations.huggingface"
)
STEERING = (
    ("online", "nothing was tuned"),
    ("schedule", "nothing was replayed"),
    ("export_schedule", "no schedule was written"),
)


class Watcher:
    """Calls back when a module has been imported; sits in front of `sys.meta_path`."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[Any], None]]] = {}  # not evaluated, so it may be newer than 3.6
        self.asking = False

    def when_imported(self, name: str, callback: "Callable[[Any], None]") -> None:
        """Call back with a module: now if it is there, else once its code has run."""
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            callback(module)
            return
        self.callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch for nothing any more."""
        self.callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders say; the loader of a watched module is made to call back."""
        if self.asking or name not in self.callbacks:
            return None
        self.asking = True
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = None if finder is self or find is None else find(name, path, target)
                if spec is not None:
                    self._listen(name, spec.loader)
                    return spec
        finally:
            self.asking = False
        return None

    def _listen(self, name: str, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            for callback in self.callbacks.pop(name, ()):
                callback(module)

        try:
            loader.exec_module = exec_module  # the loader keeps its type: packages ask theirs for resources
        except AttributeError as error:
            refuse(f"the import of {name} cannot be watched: {error}")


class Notes:
    """What the processes of a run leave for its first one, in a file without a name that ends with that one.

    The first is the script, or the launcher whose children are: it alone lives as long as CMD does, and says at its end
    that DeepSpeed was not initialised. Where there is no such file nothing is said.
    """

    NAME = "ZFTUNE_RUN_NOTES"
    KIND = "zftune-run"
    FILE = "notes"  # in the folder of a recording, whose parent reads it
    PYTHON = b"p"  # a Python began
    TORCH = b"t"  # torch was imported
    LACKS = b"n"  # by a Python without zftune
    OWN = b"z"  # the script imported zenflow
    TRAINER = b"h"  # it uses the Trainer of transformers
    LAUNCHES = b"l"  # torchrun's or DeepSpeed's launcher began, which may start no rank, or ranks on other machines
    CALLED = b"c"  # deepspeed.initialize was called, or it has been said why that does nothing
    RANK = b"r"  # a rank has begun
    STEERED = b"s"  # a zenflow optimizer takes steps, or it has been said why it is let alone
    told = False  # why the training runs as without zftune

    def keep(self) -> None:
        """Be the first process."""
        create = getattr(os, "memfd_create", None)  # of Linux and Python 3.8
        if create is not None:
            descriptor = create(self.KIND)
            os.environ[self.NAME] = "/proc/%d/fd/%d" % (os.getpid(), descriptor)  # noqa: UP031 - as others read it
            atexit.register(self.tell, os.getpid(), descriptor)

    def add(self, note: bytes) -> None:
        """Leave a note for the first process, or for who records; on another machine there is none."""
        path = os.environ.get(self.NAME, "")
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/memfd:" + self.KIND):  # noqa: PTH115
                with open(path, "ab") as file:  # noqa: PTH123
                    file.write(note)
        if FOLDER:
            path = os.path.join(FOLDER, self.FILE)  # noqa: PTH118
            with contextlib.suppress(OSError), open(path, "ab") as file:  # noqa: PTH123
                own_only(file)
                file.write(note)

    def tell(self, pid: int, descriptor: int) -> None:
        """Say that nothing came, at the end of the first process; not after an error of its own."""
        if os.getpid() != pid or getattr(sys, "last_value", None) is not None:
            return
        if not os.path.exists(os.environ.get(self.NAME, "")):  # noqa: PTH110
            return  # /proc is hidden: nobody could leave a note
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the script: the notes, or stderr
            notes = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            sys.stderr.write(missed(notes, wanted()))


def missed(notes: bytes, asked: Any) -> str:
    """What is to be said of a run where nothing came of what was asked for; "": something did.

    Args:
        notes: of its processes.
        asked: of `zftune run`.
    """
    if Notes.LAUNCHES in notes and Notes.RANK not in notes:  # the launcher has said why, or they are elsewhere
        return ""
    lacking = [words for name, words in STEERING if asked.get(name)]
    if (Notes.STEERED if lacking else Notes.CALLED) in notes:
        return ""
    why = None
    if Notes.PYTHON not in notes:
        why = NO_PYTHON
    elif Notes.LACKS in notes:
        why = NO_ZFTUNE
    elif Notes.OWN not in notes and Notes.TORCH not in notes:
        why = NO_TORCH
    uses_trainer = Notes.TRAINER in notes
    if lacking:
        make_one = OF_TRAINER if uses_trainer else "in a plain loop make one: " + ONE_LINE
        in_a_loop = "zenflow was imported" if Notes.OWN in notes else make_one
        return NOT_STEERED % (lacking[0], why or in_a_loop)
    if Notes.OWN in notes:
        why = why or "optimizers of zenflow that a script makes keep their settings, zftune run --online tunes them"
    without = "without DeepSpeed " + OF_TRAINER if uses_trainer else "for a plain loop use one line: " + ONE_LINE
    return NOTHING % (why or "zftune run is for scripts that make one, " + without)


def own_only(file: Any) -> None:
    """See that who records can read a file, whatever the script's umask says."""
    os.fchmod(file.fileno(), 0o600)


def refuse(reason: str) -> None:
    """Leave a record that says why this process is not measured."""
    import json
    import time

    now = int(1e9 * time.monotonic())
    ranks = {name: os.environ.get(name.upper(), "") for name in ("rank", "local_rank", "world_size")}
    header = {"kind": "header", "protocol": 1, "pid": os.getpid(), "zftune": None, "began_ns": now}
    header["python"] = ".".join(map(str, sys.version_info[:3]))
    header.update({name: int(value) if value.isdigit() else None for name, value in ranks.items()})
    end = {"kind": "end", "reason": "failed", "error": " ".join(reason.split()), "ns": now}
    try:
        with open(os.path.join(FOLDER, f"agent-{os.getpid()}.jsonl"), "a") as file:  # noqa: PTH118, PTH123
            own_only(file)
            file.write(json.dumps(header) + "\n" + json.dumps(end) + "\n")
    except OSError:
        pass  # the folder is gone, and with it whom to tell


def arm(_torch: Any) -> None:
    """Hand over to the agent, if this interpreter has the parent's."""
    notes.add(notes.TORCH)
    try:
        import zftune

        if zftune.__version__ != VERSION:
            refuse(f"this Python has zftune {zftune.__version__}, the profile is made by {VERSION}")
            return
        from zftune.agent.arming import arm as begin

        begin(watcher.when_imported, watcher.stop)
    except ImportError as error:
        refuse(f"this Python {sys.version.split()[0]} has no zftune {VERSION}: {error}")
    except Exception as error:  # noqa: BLE001 - the training goes on whatever is wrong with us, and it is recorded
        refuse(f"{type(error).__name__}: {error}")


def serve(deepspeed: Any) -> None:
    """Let a training with DeepSpeed have what `zftune run` asks for."""

    def begin() -> None:
        from zftune.agent.running import begin

        begin(deepspeed, wanted(), lambda: notes.add(notes.CALLED), lambda: notes.add(notes.STEERED))

    hand_over(begin)


def saw_torch(_torch: Any) -> None:
    """Leave a note that something may be trained here, and whether zftune is here, too."""
    import importlib.util

    try:
        lacks = importlib.util.find_spec("zftune") is None
    except (ImportError, ValueError):  # something passes for it
        lacks = True
    notes.add(notes.TORCH + notes.LACKS if lacks else notes.TORCH)


def steer(_zenflow: Any) -> None:
    """Let the optimizers of zenflow have the knobs that `zftune run` asks for, or be tuned."""
    if "zftune.agent.running" not in sys.modules:  # which imports it for DeepSpeed's trainings
        notes.add(notes.OWN)

    def begin() -> None:
        from zftune.agent.steering import begin

        begin(wanted(), watcher.when_imported, lambda: notes.add(notes.STEERED))

    if any(wanted().get(name) for name, _ in STEERING):
        hand_over(begin)


def wanted() -> Any:
    """What `zftune run` was asked for."""
    import base64
    import json

    return json.loads(base64.urlsafe_b64decode(RUN).decode())


def hand_over(begin: "Callable[[], None]") -> None:
    """Let a part of zftune begin, if this interpreter has the parent's; say so, once, where it has not."""
    version = wanted()["version"]
    try:
        import zftune

        if zftune.__version__ == version:
            begin()
            return
        reason = "this Python has zftune " + zftune.__version__ + ", not " + version
    except ImportError as error:
        reason = "this Python has no zftune " + version + ": " + str(error)
    notes.add(notes.CALLED + notes.STEERED)
    if os.environ.get("RANK", "0") == "0" and not notes.told:
        notes.told = True
        sys.stderr.write("zftune: " + reason + "; the training runs as without zftune\n")


def pass_on(runner: Any) -> None:
    """Leave a note that a launcher begins; let DeepSpeed's give other nodes what this one has."""
    notes.add(notes.LAUNCHES)
    if isinstance(getattr(runner, "EXPORT_ENVS", None), list):
        runner.EXPORT_ENVS.append("ZFTUNE")


def run_next() -> None:
    """Run the `sitecustomize` that Python would have found without us; what it raises is Python's to report."""
    us = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]  # noqa: PTH100
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if us is not None:
            sys.modules["sitecustomize"] = us


def begin() -> None:
    """Be the `sitecustomize` of this process."""
    if os.environ.get("ZFTUNE_DISABLE") != "1":
        if RUN and str(os.getpid()) == TOP and os.environ.get("RANK", "0") == "0":
            notes.keep()
        elif RUN and "RANK" in os.environ:
            notes.add(notes.RANK)
        if FOLDER:
            watcher.when_imported("torch", arm)
        if RUN:
            watcher.when_imported("deepspeed", serve)
            watcher.when_imported("zenflow", steer)
            watcher.when_imported("deepspeed.launcher.runner", pass_on)
            watcher.when_imported("torch.distributed.launcher.api", pass_on)  # torchrun's own module may be __main__
            watcher.when_imported("torch", saw_torch)
            watcher.when_imported("transformers.trainer", lambda _: notes.add(notes.TRAINER))
        notes.add(notes.PYTHON)
    run_next()


watcher = Watcher()
notes = Notes()
if __name__ == "sitecustomize":  # else zftune itself reads what is defined here
    begin()
