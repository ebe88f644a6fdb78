"""What the command of a training names, under any of the usual launchers: its ds_config, and what its script does."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zftune.ds_config.reading import (
    TELLTALES,
    Source,
    at,
    number_of,
    offload_device,
    path_of,
    read,
    read_inline,
    read_yaml,
    stage_of,
    through_accelerate,
)
from zftune.errors import BadInputError

OVERLAP = "zero_optimization.zenflow.overlap_step"
GUARD = 'if __name__ == "__main__":'
ASKS = f"; what trains in the script has to stand under `{GUARD}`, since its optimizer process reads that again"
_TRAINS = ("initialize", "prepare", "train")
"""Names of what makes an engine, or trains with one: DeepSpeed's, Accelerate's, the Trainer's."""
_OF_TRAINER = "trainer"
"""In the name of what trains by `.train()`, or of its class: that of a module only switches its mode."""
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class Unguarded(NamedTuple):
    """A call that makes a script train wherever it is read."""

    script: Path
    line: int
    call: str

    def __str__(self) -> str:
        return (
            f"'{self.script}' calls {self.call}(...) in line {self.line} whenever it is read: with "
            f"{OVERLAP} in DeepSpeed's own runtime it must stand under `{GUARD}`. Its optimizer process reads the "
            "script again, and the training would wait for that"
        )


def overlaps(config: Mapping[str, Any]) -> bool:
    """Whether upstream updates in a process of its own with a ds_config."""
    overlap = at(config, ("zero_optimization", "zenflow", "overlap_step"))
    return overlap is True and stage_of(config) in (1, 2, 3) and offload_device(config) != "none"


def require_guard(config: Mapping[str, Any], script: Path | None) -> None:
    """Refuse an overlapped update where its process would train as well.

    Args:
        config: a ds_config for upstream.
        script: of the training; None: it is not known.

    Raises:
        BadInputError: the script trains wherever it is read.
    """
    found = unguarded(script) if script is not None and overlaps(config) else None
    if found is not None:
        raise BadInputError(str(found))


def script_of(command: Sequence[str]) -> Path | None:
    """The script that a command runs, under any launcher; None: none that is there."""
    return next((Path(word) for word in command if word.endswith(".py") and os.path.isfile(word)), None)  # noqa: PTH113


def script_of_this() -> Path | None:
    """The script of this process; None: it has none, or is one that was spawned."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else Path(path)


def unguarded(script: Path) -> Unguarded | None:
    """The first call by which a script trains whenever it is read; None: there is none, or it cannot be read.

    Calls are followed into the script's own functions, and into no other file.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    functions = {one.name: one for one in tree.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    trainers = _trainers(tree)
    for call in _calls(tree.body):
        if _trains(call, functions, trainers, set()):
            return Unguarded(script, call.lineno, ast.unparse(call.func))
    return None


def written_in(script: Path | None) -> Iterator[dict[str, Any]]:
    """Each ds_config that stands in a script as a literal, with nothing but its ZeRO section.

    Args:
        script: of the training; None: it is not known.
    """
    try:
        tree = ast.parse(b"" if script is None else script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and key.value == "zero_optimization":
                try:
                    yield {"zero_optimization": ast.literal_eval(value)}
                except ValueError:  # a part of it is computed
                    yield {}


class Names(NamedTuple):
    """What stands in a script and in the modules beside it that it imports."""

    imported: set[str]
    """Packages and modules, those beside it left out."""
    words: set[str]
    """Names and strings."""
    passed: set[str]
    """Names of what is passed to a function called `initialize`; "**" for what has none here."""
    settings: set[str]
    """Words by which it may set something: not those that it only logs, or reads a value by."""


def names_in(script: Path) -> Names:
    """What a script names; nothing where it, or a module beside it, cannot be read.

    Args:
        script: of the training.
    """
    found = imported, words, passed, settings = Names(set(), set(), set(), set())
    left, read_ones = [script], set()
    while left:
        path = left.pop()
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return Names(set(), set(), set(), set())
        read_ones.add(path)
        for node in ast.walk(tree):
            words |= set(_words(node))
            imported |= set(_imported(node))
            passed |= set(_passed(node))
        settings |= set(_settings(tree))
        beside = {name: script.parent / f"{name}.py" for name in imported}
        there = {name for name, one in beside.items() if one.is_file()}
        imported -= there
        left += [beside[name] for name in there if beside[name] not in read_ones]
    return found


class Unfilled(NamedTuple):
    """Settings whose "auto" nobody replaces."""

    script: Path
    crashing: tuple[str, ...]
    """With which DeepSpeed ends."""
    off: tuple[str, ...]
    """Switches, which DeepSpeed takes for false then."""

    def __str__(self) -> str:
        also = f" (so too {', '.join(self.crashing[1:])})" if self.crashing[1:] else ""
        return f"{self.because}: DeepSpeed is given the word itself{also}"

    @property
    def refusal(self) -> str:
        """The sentence with which `zftune run` ends."""
        return f'{self.crashing[0]} is "auto"; it must be {OWN_VALUE}: {self}'

    @property
    def because(self) -> str:
        """Why nobody does."""
        return f"{_ONLY}, and {self.script} uses neither"


def unfilled(config: Mapping[str, Any], script: Path | None) -> Unfilled | None:
    """What DeepSpeed is given the word "auto" for; None: nothing, or that is not certain.

    It is where a script makes DeepSpeed's engine itself, and neither names what fills in "auto" nor the settings.

    Args:
        config: a ds_config.
        script: of the training; None: it is not known.
    """
    if script is None or not autos_given(config):
        return None
    found = names_in(script)
    if not _makes_engine(script, found) or "**" in found.passed:
        return None
    left = [name for name in autos_given(config, found.passed) if path_of(name)[-1] not in found.settings]
    off = tuple(name for name in left if name in _SWITCHES)
    crashing = tuple(name for name in left if name not in _SWITCHES)
    return Unfilled(script, crashing, off) if crashing or off else None


def makes_engine(script: Path | None) -> bool:
    """Whether it is certain that a script makes DeepSpeed's engine itself, and names neither Trainer nor Accelerate.

    Args:
        script: of the training; None: it is not known.
    """
    return script is not None and _makes_engine(script, names_in(script))


def _makes_engine(script: Path, found: Names) -> bool:
    fills = any(word in _FILLERS or "Trainer" in word for word in found.words)
    folders = (script.parent / name for name in found.imported)  # of packages of its own, which are not read
    return {"deepspeed", "initialize"} <= found.words and not fills and not any(one.is_dir() for one in folders)


def autos_given(config: Mapping[str, Any], passed: Collection[str] = ()) -> list[str]:
    """Settings that DeepSpeed itself has nothing for where they are "auto", and that it reads.

    Args:
        config: a ds_config as it is given to it.
        passed: names of what else is passed to `deepspeed.initialize`.
    """
    unread = tuple(f"{section}." for section, by in _PASSED_INSTEAD.items() if by in passed)
    return [name for name in TELLTALES if at(config, path_of(name)) == "auto" and not name.startswith(unread)]


def require_filled(config: Mapping[str, Any], passed: Collection[str]) -> None:
    """Refuse a ds_config with which DeepSpeed would end at the word "auto".

    Args:
        config: as it is given to `deepspeed.initialize`.
        passed: names of what else is.

    Raises:
        BadInputError: there is such a setting.
    """
    for name in autos_given(config, passed):
        if name not in _SWITCHES:
            raise BadInputError(f'{name} is "auto"; it must be {OWN_VALUE}: {_ONLY}, and neither did')


OWN_VALUE = "a value of your own"
_ONLY = 'only Hugging Face\'s Trainer and Accelerate put a value in for "auto"'
_FILLERS = ("Accelerator", "accelerate")
_SWITCHES = ("bf16.enabled", "fp16.enabled")
_PASSED_INSTEAD = {"optimizer": "optimizer", "scheduler": "lr_scheduler"}
"""Sections that DeepSpeed does not read where the script passes this."""


def own_loop(command: Sequence[str]) -> Path | None:
    """The script of a command where it is certain that it trains by torch alone; None: it may be anything.

    Args:
        command: a program and its arguments.
    """
    script = script_of(command)
    found = Names(set(), set(), set(), set()) if script is None else names_in(script)
    is_alone = "torch" in found.imported and found.imported <= _TORCH | sys.stdlib_module_names
    return script if is_alone and not found.words & _STARTS_OTHERS else None


def uses_trainer(command: Sequence[str]) -> bool:
    """Whether the script of a command names a Trainer of transformers or TRL, and the command no DeepSpeed.

    Args:
        command: a program and its arguments.
    """
    script = script_of(command)
    if script is None or any("deepspeed" in word for word in command):
        return False
    found = names_in(script)
    return bool(found.imported & {"transformers", "trl"}) and any(word.endswith("Trainer") for word in found.words)


_TORCH = {"torch", "torchvision", "numpy", "tqdm", "zenflow", "zftune"}
_STARTS_OTHERS = {"subprocess", "runpy", "importlib", "__import__", "exec", "execv", "execvp", "system"}


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]
    elif isinstance(node, ast.Import):
        yield from (one.name.partition(".")[0] for one in node.names)


_PARAMETERS = ("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler")
"""Of `deepspeed.initialize`, in their order."""


def _passed(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "initialize":
        return
    if any(isinstance(one, ast.Starred) for one in node.args):
        yield "**"
    yield from _PARAMETERS[: len(node.args)]
    yield from (one.arg or "**" for one in node.keywords)


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, (ast.Attribute, ast.Name)):
        yield node.attr if isinstance(node, ast.Attribute) else node.id
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (getattr(node, "module", None) or "").split(".")
        for one in node.names:
            yield from one.name.split(".")


_RECORDS = ("log", "log_metrics", "log_dict", "debug", "info", "warning", "print", "set_postfix", "add_scalar", "track")
"""Names of what records what it is given."""


def _settings(tree: ast.AST) -> Iterator[str]:
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _RECORDS:
            continue
        if isinstance(node, ast.Dict) and any(_word(key).endswith("loss") for key in node.keys):  # figures of a step
            left += node.values
        elif isinstance(node, ast.Call) and any((one.arg or "").endswith("loss") for one in node.keywords):  # so too
            left += [node.func, *node.args, *(one.value for one in node.keywords)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords):
            left.append(node.func.value)  # as `engine.train_micro_batch_size_per_gpu()`
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _word(node.slice):
            left.append(node.value)
        else:
            left += ast.iter_child_nodes(node)
        yield from () if isinstance(node, ast.Name) else _words(node)


def _word(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _trainers(tree: ast.AST) -> set[str]:
    """What the script calls its trainers."""
    made = (one for one in ast.walk(tree) if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call))
    return {
        ast.unparse(target)
        for one in made
        for target in one.targets
        if isinstance(one.value, ast.Call) and _OF_TRAINER in ast.unparse(one.value.func).lower()
    }


def _trains(call: ast.Call, functions: Mapping[str, ast.AST], trainers: set[str], seen: set[str]) -> bool:
    if isinstance(call.func, ast.Attribute):
        whose = ast.unparse(call.func.value)
        is_trainer = whose in trainers or _OF_TRAINER in whose.lower()
        return call.func.attr in _TRAINS and (call.func.attr != "train" or is_trainer)
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in functions:
        return name in _TRAINS
    if name in seen:
        return False
    seen.add(name)
    return any(_trains(one, functions, trainers, seen) for one in _calls(getattr(functions[name], "body", [])))


def _calls(body: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Those that are made when a body runs, in order; not under a guard, nor in what is only defined."""
    for node in body:
        if isinstance(node, _LATER):
            continue
        if isinstance(node, ast.If) and any(
            isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test)
        ):
            yield from _calls(node.orelse)
            continue
        yield from _calls(list(ast.iter_child_nodes(node)))
        if isinstance(node, ast.Call):
            yield node


_FLAG = "--deepspeed"  # to DeepSpeed's own parser; others take a value after it
_OPTIONS = ("--deepspeed_config", "--deepspeed_config_file", "--ds_config")
_OF_ACCELERATE = (
    "deepspeed_config_file",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_save_16bit_model",
    "mixed_precision",
)
_OTHER_KINDS = ("--cpu", "--multi_gpu", "--tpu", "--tpu_use_cluster", "--use_fsdp", "--use_megatron_lm")
_JSON = (".json", ".hjson")
_SUFFIXES = (".json", ".yaml", ".yml")
_DEEPEST = 4  # names and calls that a path goes through, such as str(CONFIG)
_WRITES = ("dump", "write", "write_text")
_EXITS = re.compile(r"(sys\.)?exit|quit|os\._exit|SystemExit(\(.*\))?|(\w*\.)?\w*parser\.(exit|error)")
_MAYBE = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.Lambda),
    *(ast.AsyncFunctionDef, ast.ClassDef),
)  # what stands in one of them may never run
_LARGEST_BYTES = 1 << 20  # of the arguments of a training; data in JSON is more


def named_by(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Source]:
    """Each ds_config that a command names: by an option of its script, in a file of arguments, by the path that the
    script passes to `deepspeed.initialize`, else by Accelerate.

    What is not there, or is something else, is the training's own matter.

    Args:
        command: a program and its arguments.
        environment: in which it is run.

    Raises:
        BadInputError: a JSON that an option names is none, or Accelerate ends.
    """
    launch, words = _split(command)
    options = list(_options(words))
    values = [pair for pair in options if pair[0] in _OPTIONS] or [pair for pair in options if pair[0] == _FLAG]
    found = [source for option, value in values if (source := _given(option, value)) is not None]
    found = found or list(_recipes([*words[1:], *(value for _, value in options)]))
    handed = None if found or launch is not None else _handed(script_of(command))
    if handed is not None and (source := _given("config", str(handed))) is not None:
        found = [source]
    yield from found
    if launch is not None and not found:
        yield from _through_accelerate(dict(_options(launch)), environment)


def _handed(script: Path | None) -> Path | None:
    """The file whose path a script passes to `deepspeed.initialize`; None: what it passes is not certain from here."""
    try:
        nodes = list(ast.walk(ast.parse(b"" if script is None else script.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return None
    calls = [one for one in nodes if isinstance(one, ast.Call) and ast.unparse(one.func).endswith("initialize")]
    passed = [one.value for call in calls for one in call.keywords if one.arg == "config"]
    bound = [one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    bound += [one.arg for one in nodes if isinstance(one, ast.arg)]
    writes = any(isinstance(one, ast.Attribute) and one.attr in _WRITES for one in nodes)  # it may make the file
    values = {
        ast.unparse(one.targets[0]): one.value
        for one in nodes
        if isinstance(one, ast.Assign) and bound.count(ast.unparse(one.targets[0])) == 1
    }
    if script is None or writes or len(passed) != 1 or len(calls) != 1 or not _runs_always(nodes[0], calls[0]):
        return None
    value = passed[0]
    for _ in range(_DEEPEST):
        if isinstance(value, ast.Name) and value.id in values:
            value = values[value.id]
        elif isinstance(value, ast.Call) and ast.unparse(value.func) in ("str", "Path") and len(value.args) == 1:
            value = value.args[0]
    beside = isinstance(value, ast.Call) and ast.unparse(value.func) == "Path(__file__).with_name"
    name = _word(value.args[0] if isinstance(value, ast.Call) and value.args else value)
    if not name.endswith(_JSON) or (isinstance(value, ast.Call) and not beside):
        return None
    path = script.with_name(name) if beside else Path(name)
    return path if path.is_file() else None


def _runs_always(tree: ast.AST, call: ast.Call) -> bool:
    """Whether a script calls it whatever is so: nothing that it stands in, or that comes before, may leave it out."""
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    node: ast.AST = call
    reached = {node}
    while node in above:
        below, node = node, above[node]
        if isinstance(node, _MAYBE) and not _is_guarded(node, below):
            return False
        if isinstance(node, ast.FunctionDef):
            returns = [one for one in ast.walk(node) if isinstance(one, ast.Return) and one.lineno < call.lineno]
            ways = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == node.name]
            if len(ways) != 1 or ways[0] in reached or returns:
                return False
            node = call = ways[0]
        reached.add(node)
    return not any(_is_exit(one) and one not in reached for one in ast.walk(tree))  # sys.exit(main()) is reached


def _is_guarded(node: ast.AST, below: ast.AST) -> bool:
    """Whether this is what a script does where it is no module."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" and below in node.body


def _is_exit(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
    return called is not None and _EXITS.fullmatch(ast.unparse(called)) is not None


def missing(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options of a command that name a ds_config, or Accelerate's file, which is not there; each with what it names.

    Args:
        command: a program and its arguments.
    """
    launch, words = _split(command)
    for option, value in _options(words):
        named = option in _OPTIONS or (option == _FLAG and Path(value).suffix in _JSON)
        if named and not _is_file(value) and read_inline(value) is None:
            yield option, value
    for option, value in _options(launch or ()):
        if option in ("--config_file", "--deepspeed_config_file") and value != "none" and not _is_file(value):
            yield option, value


def _split(command: Sequence[str]) -> tuple[Sequence[str] | None, Sequence[str]]:
    """What `accelerate launch` is told, and its script with arguments; None: it is not there, and all is the script."""
    names = [Path(word).name for word in command]
    for index, name in enumerate(names):
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            rest = command[index + 1 :]
        elif name in ("accelerate", "accelerate.commands.accelerate_cli") and names[index + 1 : index + 2] == [
            "launch"
        ]:
            rest = command[index + 2 :]
        else:
            continue
        script = (index for index, word in enumerate(rest) if word.endswith(".py") or word in ("-m", "--module"))
        end = next(script, len(rest))
        return rest[:end], rest[end:]
    return None, command


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for option, value in zip(words, [*words[1:], ""], strict=True) if words else ():
        name, _, joined = option.partition("=")
        if name.startswith("--"):
            yield name.replace("-", "_").replace("__", "--", 1), joined or value


def _given(option: str, value: str) -> Source | None:
    """A file, or the ds_config itself: as JSON, which Hugging Face takes, or in base64, as DeepSpeed does."""
    if _is_file(value):
        try:
            return read(value)
        except BadInputError:
            if Path(value).suffix in _JSON:
                raise
            return None
    config = read_inline(value)
    return Source(config, through=option) if config is not None else None


def _recipes(words: Sequence[str]) -> Iterator[Source]:
    """Arguments of a Trainer, LLaMA-Factory, axolotl or another, in a file."""
    for word in dict.fromkeys(words):
        if Path(word).suffix in _SUFFIXES and _is_file(word) and Path(word).stat().st_size <= _LARGEST_BYTES:
            try:
                source = read(word)
            except BadInputError:
                continue
            if source.through is not None:
                yield source


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def _through_accelerate(options: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Source]:
    """As `accelerate launch` puts it together: its file, or that of `accelerate config`, then its options."""
    path, whole = options.get("--config_file") or _default_file(environment), {}
    if _is_file(path):
        found = read_yaml(path)
        whole = found if isinstance(found, dict) else {}
    of_file = whole.get("distributed_type") == "DEEPSPEED" and not any(kind in options for kind in _OTHER_KINDS)
    if "--use_deepspeed" not in options and not of_file:
        return
    given: dict[str, Any] = {name: number_of(options[f"--{name}"]) for name in _OF_ACCELERATE if f"--{name}" in options}
    section = whole.get("deepspeed_config") or {}
    file = given.get("deepspeed_config_file", section.get("deepspeed_config_file"))
    if file in (None, "none") or _is_file(str(file)):
        yield through_accelerate(path if whole else "accelerate launch", whole, given)


def _default_file(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", f"{cache}/huggingface")
    return os.path.expanduser(f"{home}/accelerate/default_config.yaml")  # noqa: PTH111
