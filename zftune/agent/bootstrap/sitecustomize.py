"""Found by Python before any other `sitecustomize`: arms what is asked for, and runs the next one.

`zftune profile` and its like ask for a recording, which begins once torch is imported; `zftune run` for the backends of
DeepSpeed, once that is imported, and for knobs of zenflow's optimizers, once zenflow is.

Standard library only, syntax of Python 3.6: any interpreter may come across it. It never raises on its own account.
"""

import contextlib
import importlib
import os
import sys
from typing import Any, Callable  # noqa: UP035 - of Python 3.6

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - every start of an interpreter comes by here
FOLDER = os.environ.get("ZFTUNE_AGENT_DIR", "")
VERSION = os.environ.get("ZFTUNE_AGENT_VERSION", "")
RUN = os.environ.get("ZFTUNE_RUN", "")
NOTHING = (
    "zftune: nothing was changed: this training takes steps without a call of deepspeed.initialize; in a loop of your "
    "own use one line: "
)
NOT_STEERED = "zftune: %s: the first step was %s's, which is no optimizer of zenflow; make one: "
ONE_LINE = "optimizer = zenflow.ZenFlow%s(%s, module=model)"
OURS = ("AdamW", "Adam", "Adagrad", "Lion", "SGD")  # in this order: torch's AdamW is an Adam
ARGUMENTS = (
    "lr",
    "lr_decay",
    "betas",
    "momentum",
    "dampening",
    "eps",
    "initial_accumulator_value",
    "weight_decay",
    "nesterov",
)
STEERING = (
    ("online", "nothing is tuned"),
    ("schedule", "nothing is replayed"),
    ("export_schedule", "no schedule is written"),
)
told: Any = []  # by this process: what is to be told once
called: Any = []  # not empty once deepspeed.initialize was called


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
            os.fchmod(file.fileno(), 0o600)  # for who records, whatever the script's umask says
            file.write(json.dumps(header) + "\n" + json.dumps(end) + "\n")
    except OSError:
        pass  # the folder is gone, and with it whom to tell


def arm(_torch: Any) -> None:
    """Hand over to the agent, if this interpreter has the parent's."""
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

        begin(deepspeed, wanted(), lambda: called.append(True))

    hand_over(begin)


def steer(_zenflow: Any) -> None:
    """Let the optimizers of zenflow have the knobs that `zftune run` asks for, or be tuned."""

    def begin() -> None:
        from zftune.agent.steering import begin

        begin(wanted(), watcher.when_imported)

    if any(wanted().get(name) for name, _ in STEERING):
        hand_over(begin)


def look_on(_torch: Any) -> None:
    """Say at the first step of a training by which optimizer nothing comes of what was asked for, if nothing does."""
    try:
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_pre_hook
    except ImportError:  # of an old torch
        return
    looked: Any = []

    def steps(optimizer: Any, *_: Any) -> None:
        if not is_compiling() and not looked:
            looked.append(True)
            say(missed(optimizer))

    register_optimizer_step_pre_hook(steps)


def missed(optimizer: Any) -> str:
    """What is to be said of a training whose first step is one of this optimizer's; "": something comes of it."""
    import multiprocessing

    if multiprocessing.parent_process() is not None:
        return ""  # perhaps DeepSpeed's own process for updates: what began it speaks
    kind = type(optimizer)
    is_ours = any(one.__module__.partition(".")[0] == "zenflow" for one in kind.__mro__)
    for name, words in STEERING:
        if wanted().get(name):
            return "" if is_ours else NOT_STEERED % (words, kind.__name__) + one_line(optimizer)
    return "" if is_ours or called else NOTHING + one_line(optimizer)


def one_line(optimizer: Any) -> str:
    """What makes one of zenflow in place of the script's optimizer, with its arguments; else which ones there are."""
    kinds = {one.__name__ for one in type(optimizer).__mro__}
    kind = next((name for name in OURS if name in kinds), None)
    if kind is None:
        return "one of zenflow.ZenFlow" + ", ZenFlow".join(OURS) + ", since it has no " + type(optimizer).__name__
    values = [(name, optimizer.defaults[name]) for name in ARGUMENTS if name in optimizer.defaults]
    shown = [name + "=" + repr(value.item() if hasattr(value, "item") else value) for name, value in values]
    parameters = "model.parameters()" if len(optimizer.param_groups) == 1 else "[...]"
    return ONE_LINE % (kind, ", ".join([parameters, *shown]))


def say(sentence: str) -> None:
    """Write one on standard error: once, by the first rank."""
    if sentence and not told and os.environ.get("RANK", "0") == "0":
        told.append(sentence)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the script closed it
            sys.stderr.write(sentence + "\n")


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
    say("zftune: " + reason + "; the training runs as without zftune")


def pass_on(runner: Any) -> None:
    """Let DeepSpeed's launcher give other nodes what this one has."""
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
        if FOLDER:
            watcher.when_imported("torch", arm)
        if RUN:
            watcher.when_imported("deepspeed", serve)
            watcher.when_imported("zenflow", steer)
            watcher.when_imported("deepspeed.launcher.runner", pass_on)
            watcher.when_imported("torch", look_on)
    run_next()


watcher = Watcher()
if __name__ == "sitecustomize":  # else zftune itself reads what is defined here
    begin()
