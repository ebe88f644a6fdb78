"""Which settings of a ds_config a version of DeepSpeed refuses, from its table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from zenflow.names import LIKENESS, nearest
from zftune.ds_config.facts import OWN_KNOBS
from zftune.ds_config.reading import MISSING, SettingPath, at, enabled, truth
from zftune.ds_config.tables import ASKED, Table, kind_of, known_names, model_in
from zftune.integrations.deepspeed.section import FIELDS, NAME
from zftune.text import either

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NONE = "none of that name"
"""What is allowed of a setting that DeepSpeed does not know."""
UNTESTED = "zero_allow_untested_optimizer"
_ZERO = "zero_optimization"
_TYPO = 0.85
_MASTERS = {f"{name} masters": (name, f"{name}_master_weights_and_grads") for name in ("fp16", "bf16")}


@dataclass(frozen=True, slots=True)
class Fault:
    """A setting that DeepSpeed refuses."""

    path: SettingPath
    allowed: str
    """What it takes there, or with what else; completes "DeepSpeed takes"."""
    unknown: bool = False
    """Whether it has no setting of that name."""
    needs: str = ""
    """A switch with which it would be taken."""
    near: str = ""
    """The word that may have been meant, or the name where that is unknown: "did you mean cpu"."""


def faults(config: Mapping[str, Any], table: Table, world_size: int | None = None) -> list[Fault]:
    """Each setting that DeepSpeed refuses where it reads the file or makes the engine, at most one for a setting.

    Args:
        config: without words that somebody else fills in.
        table: of the version.
        world_size: number of ranks; None: any that the batch sizes fit.
    """
    found: dict[SettingPath, Fault] = {}
    for fault in (
        *_of_models(config, table),
        *_of_plain(config, table),
        *_of_batch(config, table, world_size),
        *_of_optimizer(config, table),
        *_of_scheduler(config, table),
        *_of_relations(config, table),
    ):
        found.setdefault(fault.path, fault)
    return list(found.values())


_LET_BE: tuple[SettingPath, ...] = ((), ("optimizer",), ("scheduler",))
"""Sections in which DeepSpeed lets every name be."""
_OTHER_WORDS = {"learning_rate": "lr", "wd": "weight_decay", "l2": "weight_decay", "epsilon": "eps"}
"""Of an optimizer's settings, which others name so."""


def meant(path: SettingPath) -> str:
    """A question about a setting that nobody knows: "did you mean lr"; "" where no name is near.

    Where DeepSpeed lets every name be, as at the top level, only what differs in a letter or two is near.

    Args:
        path: where it stands.
    """
    section, name = path[:-1], path[-1]
    known = set(known_names(section))
    others = _OTHER_WORDS if section == ("optimizer", "params") else {}
    if section == (_ZERO, "zenflow"):
        known.update(OWN_KNOBS)
    elif not section:
        known.add(NAME)
    elif section == (NAME,):
        known.update(FIELDS)
    if name in others:
        return f"did you mean {others[name]}"
    if name in known or name in known_names(()):  # of another version, or in another place
        return ""
    if not section and (name.startswith("_") or name.endswith("_")):  # switched off so, by habit
        return ""
    return _near(name, {*known, *others}, _TYPO if section in _LET_BE else LIKENESS, others)


def mistyped(value: Any, near: str) -> str:
    """The one word that a value differs from in a letter or two; "" where there is none, or several.

    Args:
        value: that is refused.
        near: what ends with "did you mean cpu", as faults and refusals have it.
    """
    found = re.search(r"\bdid you mean (\S+)$", near)
    return nearest(value, (found[1],), _TYPO) if found is not None and isinstance(value, str) else ""


def misspelt(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names, with dots, that DeepSpeed lets be and that are near one which it reads; each with `meant`."""
    for section in _LET_BE:
        found = at(config, section)
        for name in found if isinstance(found, Mapping) else ():
            if near := meant((*section, name)):
                yield ".".join((*section, name)), near


def undecided(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Sections that no table is about, and that are not empty or switched off: the installed DeepSpeed knows."""
    return tuple(name for name in ASKED if name in config and config[name] not in ({}, {"enabled": False}))


# Sections that a pydantic model reads


def _of_models(config: Mapping[str, Any], table: Table) -> Iterator[Fault]:
    for dotted in table.removed:
        if at(config, tuple(dotted.split("."))) is not MISSING:
            yield Fault(tuple(dotted.split(".")), NONE, unknown=True)
    for dotted, model in table.sections.items():
        path = tuple(dotted.split("."))
        value = at(config, path)
        if isinstance(value, Mapping) and not (dotted == "bfloat16" and config.get("bf16") is not None):
            yield from _of_model(path, value, model, table)


def _of_model(path: SettingPath, value: Mapping[str, Any], model: type[BaseModel], table: Table) -> Iterator[Fault]:
    value = dict(value)
    leaf = value.get("leaf_module", MISSING)
    coerces = any("_coerce_container_types" in checks for checks in table.checks.values())
    if leaf is None and coerces:  # taken for an empty one
        del value["leaf_module"]
    elif isinstance(leaf, Mapping):  # a word stands for a list of one there
        value["leaf_module"] = {name: [one] if isinstance(one, str) else one for name, one in leaf.items()}
    try:
        read = model(**value)
    except ValidationError as error:
        for one in error.errors():
            where = _given(value, tuple(str(name) for name in one["loc"]), missing=one["type"] == "missing")
            unknown = one["type"] == "extra_forbidden"
            allowed, words = (NONE, ()) if unknown else _taken(table, model.__name__, where, one["msg"])
            near = _near(at(value, where), words)
            yield Fault((*path, *where), allowed, unknown, near=near)
        return
    yield from _twice(path, value, model, table)
    yield from _checked(path, value, read, model.__name__, table)


def _given(value: Any, names: tuple[str, ...], *, missing: bool) -> SettingPath:
    """How far a place that pydantic names stands in the file: it goes on with the types of a union."""
    found: list[str] = []
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            break
        found.append(name)
        value = value[name]
    return (*found, names[-1]) if missing else tuple(found)


def _taken(table: Table, model: str, path: SettingPath, message: str) -> tuple[str, Sequence[str]]:
    """What a field takes, in words, and those words that are names."""
    fields: Mapping[str, Any] = table.models[model]["fields"]
    described: Any = None
    for name in path:
        one = fields.get(name) or next((field for field in fields.values() if field.get("alias") == name), None)
        if one is None:
            break
        described = one
        inner = model_in(one["type"])
        fields = table.models[inner]["fields"] if inner else {}
    if described is None:
        return message[:1].lower() + message[1:], ()
    return _phrase(described["type"], described.get("bounds", {})), _names(described["type"])


def _names(described: Any) -> list[str]:
    """The strings of a closed set that a field takes."""
    if isinstance(described, str):
        return []
    if "any_of" in described:
        return [name for one in described["any_of"] for name in _names(one)]
    return [name for name in described.get("literal", described.get("enum", ())) if isinstance(name, str)]


def _near(value: Any, names: Iterable[str], likeness: float = LIKENESS, others: Mapping[str, str] | None = None) -> str:
    """The question, with the name that stands for one of `others`."""
    near = nearest(value, names, likeness).split(" or ") if isinstance(value, str) else [""]
    meant_ones = dict.fromkeys((others or {}).get(name, name) for name in near)
    return f"did you mean {' or '.join(meant_ones)}" if near != [""] else ""


_PHRASES = {
    "none": "null",
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "path": "a path",
    "list": "a list",
    "dict": "a JSON object",
    "tuple": "a list",
    "object": "anything",
    "other": "nothing that JSON has",
}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _phrase(described: Any, bounds: Mapping[str, Any]) -> str:
    """What a field takes, in words."""
    if isinstance(described, str):
        text = _PHRASES[described]
    elif "any_of" in described:
        text = " or ".join(_phrase(one, {}) for one in described["any_of"])
    elif "literal" in described or "enum" in described:
        text = _choice(dict.fromkeys(described.get("literal", described.get("enum"))))
    else:
        text = "a list" if "list" in described else "a JSON object"
    limits = " and ".join(f"{_SIGNS[sign]} {bound:g}" for sign, bound in bounds.items() if sign in _SIGNS)
    return f"{text} {limits}" if limits else text


def _choice(values: Any) -> str:
    words = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _twice(path: SettingPath, value: Mapping[str, Any], model: type[BaseModel], table: Table) -> Iterator[Fault]:
    """Old names beside those that replace them."""
    for name, one in table.models[model.__name__]["fields"].items():
        new = one.get("replaced_by")
        alias = table.models[model.__name__]["fields"].get(new, {}).get("alias")
        if (
            new
            and value.get(name, "auto") != "auto"
            and any(word in value and value[word] != "auto" for word in (new, alias))
        ):
            yield Fault((*path, name), f'it without "{new}", which replaces it')


# Code of DeepSpeed's that looks at the values of a model. The tool that writes the tables knows these names too.


class _Section(NamedTuple):
    """A section that a model took."""

    given: Mapping[str, Any]
    read: Any


def _ratio(section: _Section) -> Iterator[Fault]:
    offload = section.read.offload_optimizer
    if offload is not None and offload.ratio < 1 and section.read.stage != 3:
        yield Fault(("offload_optimizer", "ratio"), "1.0 below ZeRO stage 3")


def _zenflow(section: _Section) -> Iterator[Fault]:
    select, update = section.read.select_interval, section.read.update_interval
    if section.read.select_strategy not in ("auto", "step", "epoch"):
        names = ("auto", "step", "epoch")
        yield Fault(("select_strategy",), _choice(names), near=_near(section.read.select_strategy, names))
    if isinstance(select, str) and select != "auto":
        yield Fault(("select_interval",), 'an integer or "auto"', near=_near(select, ("auto",)))
    if (isinstance(update, str) and update != "auto") or (isinstance(update, int) and update < 1):
        yield Fault(("update_interval",), 'an integer >= 1 or "auto"', near=_near(update, ("auto",)))


def _loss_scale(section: _Section) -> Iterator[Fault]:
    scale = section.read.loss_scale
    if isinstance(section.given.get("loss_scale"), bool) or not math.isfinite(scale) or scale < 0:
        yield Fault(("loss_scale",), "a finite number >= 0")


def _whole_scale(section: _Section) -> Iterator[Fault]:
    for name in ("loss_scale_window", "min_loss_scale"):
        if isinstance(section.given.get(name), bool):
            yield Fault((name,), "an integer")


def _dynamic_scale(section: _Section) -> Iterator[Fault]:
    read = section.read
    for name in ("loss_scale_window", "min_loss_scale") if read.enabled and read.loss_scale == 0 else ():
        if getattr(read, name) <= 0:
            yield Fault((name,), "an integer >= 1 where the loss scale is dynamic")


def _grad_norm(section: _Section) -> Iterator[Fault]:
    if not section.read.compute_grad_norm and section.read.stage not in (1, 2):
        yield Fault(("compute_grad_norm",), "true outside of ZeRO stages 1 and 2")


CHECKS: dict[str, Callable[[_Section], Iterator[Fault]] | None] = {
    "offload_ratio_check": _ratio,
    "compute_grad_norm_valid": _grad_norm,
    "validate_fields": _zenflow,
    "_validate_loss_scale": _loss_scale,
    "_reject_non_integer_scale_params": _whole_scale,
    "_validate_dynamic_loss_scale_params": _dynamic_scale,
    "_coerce_container_types": None,  # done before the model is asked
    "_validate_entries": None,
    "set_pipeline": None,
    "overlap_comm_valid": None,
    "elastic_checkpoint_deprecated": None,
    "check_enabled": None,
}
"""None: it refuses nothing that a file can have."""


def _checked(path: SettingPath, value: Mapping[str, Any], read: Any, model: str, table: Table) -> Iterator[Fault]:
    for name in table.checks[model]:
        check = CHECKS[name]
        for fault in check(_Section(value, read)) if check is not None else ():
            yield replace(fault, path=(*path, *fault.path))
    for name, one in table.models[model]["fields"].items():
        inner = model_in(one["type"])
        given = next((word for word in (one.get("alias"), name) if isinstance(value.get(word), Mapping)), None)
        if inner is not None and given is not None and isinstance(getattr(read, name), BaseModel):
            yield from _checked((*path, given), value[given], getattr(read, name), inner, table)
            yield from _twice((*path, given), value[given], type(getattr(read, name)), table)


# What is read by plain code


def _of_plain(config: Mapping[str, Any], table: Table) -> Iterator[Fault]:
    for dotted, taken in table.plain.items():
        path = tuple(dotted.split("."))
        value = at(config, path)
        if path[0] in ("scheduler", "optimizer") and len(path) > 1:
            continue
        if value is MISSING or (dotted in table.sections and isinstance(value, Mapping)):
            continue
        if not _takes(taken, value):
            yield Fault(path, _kinds_phrase(taken), near=_near(value, taken.get("words", ())))
        elif isinstance(value, Mapping) and not set(taken.get("needs", ())) <= set(value):
            yield Fault(path, f"an object with {_choice(taken['needs'])}")


def _takes(taken: Mapping[str, Any], value: Any) -> bool:
    if kind_of(value) in taken["kinds"]:
        return True
    if isinstance(value, Mapping) and taken.get("needs"):
        return True
    if not isinstance(value, str):
        return False
    return (value.lower() if taken.get("folds") else value) in taken.get("words", ())


_ABOVE_0 = {"a number": "a number > 0", "an integer": "an integer >= 1"}


def _kinds_phrase(taken: Mapping[str, Any]) -> str:
    kinds = set(taken["kinds"])
    parts = [_choice(taken["words"])] if taken.get("words") else []
    for phrase, of in (
        ("null", {"null"}),
        ("true or false", {"true", "false"}),
        ("a number", {"positive", "fraction"}),
        ("an integer", {"positive"}),
        ("a string", {"word"}),
        ("a list", {"list"}),
        ("a list of strings", {"words"}),
        ("a JSON object", {"object"}),
    ):
        if of <= kinds and not (phrase == "an integer" and "fraction" in kinds):
            parts.append(phrase if kinds & {"zero", "negative"} else _ABOVE_0.get(phrase, phrase))
    if taken.get("needs") or "a JSON object" in parts:
        return "a JSON object"
    return " or ".join(parts) or "it left out"


# What it reads beside


def _of_batch(config: Mapping[str, Any], table: Table, world_size: int | None) -> Iterator[Fault]:
    """Sequences of a step = of a pass on a rank * passes * ranks; what is left out follows."""
    given = {name: config[name] for name in BATCH if config.get(name) is not None}
    wrong = [name for name, value in given.items() if not isinstance(value, (int, float)) or not value > 0]
    if wrong:
        yield from (Fault((name,), "an integer >= 1") for name in wrong)
        return
    ranks: float | None = world_size
    if "sequence_parallel_size" in config and "sequence_parallel_size" in table.names:
        size = config["sequence_parallel_size"]
        wrong_size = not isinstance(size, (int, float)) or size == 0
        if (wrong_size and "no sequences in parallel" in table.relations) or (not wrong_size and size < 0):
            yield Fault(("sequence_parallel_size",), "an integer >= 1")
            return
        if ranks is not None:
            ranks = 1 if wrong_size else ranks / size  # older versions go on with one rank where they cannot divide
    whole, micro, passes = (given.get(name) for name in BATCH)
    if whole is None and micro is None:
        yield Fault(("train_micro_batch_size_per_gpu",), "an integer >= 1, or a train_batch_size in its place")
    elif whole is not None:
        yield from _fits(whole, micro, passes, ranks)


def _fits(whole: float, micro: float | None, passes: float | None, ranks: float | None) -> Iterator[Fault]:
    if ranks is None:
        known = (micro or 1) * (passes or 1)
        if whole % known:
            yield Fault((BATCH[0],), f"a multiple of what a rank takes in a step, {known:g}")
        return
    if micro is None and passes is not None:
        micro = whole // ranks // passes
    elif micro is None:
        micro, passes = whole // ranks, 1
    elif passes is None:
        passes = whole // micro // ranks
    assert passes is not None
    if micro <= 0 or passes <= 0 or whole != micro * passes * ranks:
        yield Fault((BATCH[0],), f"{BATCH[1]} * {BATCH[2]} * {ranks:g} ranks")


def ranks_that_fit(config: Mapping[str, Any]) -> int:
    """Ranks with which the batch sizes of a ds_config go together; DeepSpeed itself asks for their number.

    Where that does not follow, as many as share a sequence: one that counts.

    Args:
        config: without words that somebody else fills in.
    """
    size = config.get("sequence_parallel_size", 1)
    if not isinstance(size, int) or size < 1:
        return 1
    known: list[Any] = [config.get(name) for name in BATCH]
    if not all(isinstance(one, int) and one > 0 for one in known):
        return size
    whole, micro, passes = known
    return size * (whole // (micro * passes) if whole % (micro * passes) == 0 else 1)


_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


def _of_optimizer(config: Mapping[str, Any], table: Table) -> Iterator[Fault]:
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or section.get("type") is None:
        return
    kind, settings = section["type"], section.get("params")
    if not isinstance(kind, str):
        yield Fault(("optimizer", "type"), "a string")
        return
    if settings is not None and not isinstance(settings, Mapping):
        yield Fault(("optimizer", "params"), "a JSON object")
        return
    name = kind.lower() if kind.lower() in table.own_optimizers else kind
    stage = _stage(config)
    if name in _ONE_BIT and stage:
        yield Fault(("optimizer", "type"), f"{kind} without ZeRO")
        return
    yield from _settings_of(name, dict(settings or {}), config, table)


def _settings_of(name: str, settings: dict[str, Any], config: Mapping[str, Any], table: Table) -> Iterator[Fault]:
    path = ("optimizer", "params")
    if "max_grad_norm" in settings:
        yield Fault((*path, "max_grad_norm"), "gradient_clipping in its place")
        del settings["max_grad_norm"]
    key = _class_of(name, settings, config, table)
    if key is None:
        return
    known = table.optimizers.get(key)
    if known is None:
        names = (
            *table.own_optimizers,
            *(key.removeprefix("torch ") for key in table.optimizers if key.startswith("torch ")),
        )
        taken = f"{_choice(table.own_optimizers)}, or the name of a class in torch.optim"
        yield Fault(("optimizer", "type"), taken, near=_near(name, names))
        return
    for setting, value in settings.items():
        if setting not in known:
            yield _unknown((*path, setting), known, name)
        elif not _is_setting(setting, value, torchs=key.startswith("torch ")):
            yield Fault((*path, setting), _SETTINGS[setting])
    untested = key.startswith("torch ") and name not in table.own_optimizers and key != "torch Adam"
    allowed = config.get(UNTESTED) not in (None, False)
    if untested and _stage(config) and not allowed and "torch's optimizers are untested" in table.relations:
        yield Fault(("optimizer", "type"), f'{name} with ZeRO where "{UNTESTED}" is true', needs=UNTESTED)


def _class_of(name: str, settings: dict[str, Any], config: Mapping[str, Any], table: Table) -> str | None:
    """Which class is made; what DeepSpeed takes out of its settings goes. None: it is not known from here."""
    offload = at(config, (_ZERO, "offload_optimizer", "device"))
    offloads = offload in ("cpu", "nvme") or at(config, (_ZERO, "cpu_offload")) is True
    if name in ("adam", "adamw"):
        torchs, decoupled = settings.pop("torch_adam", False), settings.pop("adam_w_mode", True)
        if torchs:
            return "torch AdamW" if name == "adamw" or decoupled else "torch Adam"
        if offloads:
            settings.pop("fp32_optimizer_states", None)
        return "cpu adam" if offloads else "fused adam"
    if name == "adagrad":
        return "cpu adagrad" if offloads else "torch Adagrad"
    if name == "lion":
        return "cpu lion" if offloads else "fused lion"
    if name in table.own_optimizers:
        return "lamb" if name == "lamb" else None
    return f"torch {name}"


_SETTINGS = {
    "lr": "a number >= 0",
    "eps": "a number >= 0",
    "weight_decay": "a number >= 0",
    "momentum": "a number >= 0",
    "betas": "two numbers from 0 to below 1",
}


def _is_setting(name: str, value: Any, *, torchs: bool) -> bool:
    """Whether an optimizer can be made with it. torch looks at ranges, DeepSpeed's own C++ at types."""
    if name == "betas":
        pair = isinstance(value, list) and len(value) == 2 and all(isinstance(one, (int, float)) for one in value)
        return pair and (not torchs or all(0 <= one < 1 for one in value))
    if name in _SETTINGS:
        return isinstance(value, (int, float)) and (not torchs or value >= 0)
    return True


def _of_scheduler(config: Mapping[str, Any], table: Table) -> Iterator[Fault]:
    section = config.get("scheduler")
    if not isinstance(section, Mapping) or section.get("type") is None:
        return
    kind, settings = section["type"], section.get("params")
    prefix = f"scheduler.{kind}."
    known = {name.removeprefix(prefix): taken for name, taken in table.plain.items() if name.startswith(prefix)}
    if not isinstance(kind, str) or not known:
        kinds = dict.fromkeys(name.split(".")[1] for name in table.plain if name.startswith("scheduler."))
        allowed = f"{_choice(kinds)}, or the name of a class in torch.optim.lr_scheduler"
        yield Fault(("scheduler", "type"), allowed, near=_near(kind, kinds))
        return
    if not isinstance(settings, Mapping):
        yield Fault(("scheduler", "params"), "a JSON object")
        return
    for name, value in settings.items():
        if name not in known:
            yield _unknown(("scheduler", "params", name), known, kind)
        elif not _takes(known[name], value):
            near = _near(value, known[name].get("words", ()))
            yield Fault(("scheduler", "params", name), _kinds_phrase(known[name]), near=near)
    misspelt_ones = " ".join(_unknown(("scheduler", "params", name), known, kind).near for name in settings)
    for name, taken in known.items():
        if taken.get("required") and name not in settings and name not in misspelt_ones.split():
            yield Fault(("scheduler", "params", name), f"{_kinds_phrase(taken)} for {kind}")


def _unknown(path: SettingPath, known: Iterable[str], kind: str) -> Fault:
    """A setting that an optimizer or scheduler of a kind does not have; that of another one is no slip of the pen."""
    near = meant(path)
    return Fault(
        path, f"{either(list(known))} for {kind}", unknown=True, near=near and (_near(path[-1], known) or near)
    )


def _of_relations(config: Mapping[str, Any], table: Table) -> Iterator[Fault]:
    """Settings that go together with nothing else, or with something only."""
    if config.get("bf16") is None and "bfloat16" in config:  # its old name
        config = {**config, "bf16": config["bfloat16"]}
    stage, has = _stage(config), table.relations
    fp16, bf16 = enabled(config, "fp16"), enabled(config, "bf16")
    if "two dtypes" in has and fp16 and bf16:
        yield Fault(("fp16", "enabled"), "one of fp16 and bf16")
    for relation, (section, name) in _MASTERS.items():
        if relation in has and truth(at(config, (section, name))) and not stage:
            yield Fault((section, name), "it with ZeRO only")
    masters = stage and truth(at(config, ("bf16", "bf16_master_weights_and_grads")))
    if "bf16 states" in has and truth(at(config, ("bf16", "bf16_optimizer_states"))) and not masters:
        yield Fault(("bf16", "bf16_optimizer_states"), "it with bf16_master_weights_and_grads only")
    if str(config.get("gradient_allreduce_op", "mean")).lower() == "sum":
        alone = {
            "sum at stage 3": stage == 3,
            "sum with ZenFlow": isinstance(at(config, (_ZERO, "zenflow")), Mapping),
            "sum with DeepCompile": truth(at(config, ("compile", "deepcompile"))),
        }
        if any(relation in has and holds for relation, holds in alone.items()):
            yield Fault(("gradient_allreduce_op",), '"mean" with ZeRO stage 3, ZenFlow and DeepCompile')


def _stage(config: Mapping[str, Any]) -> int:
    zero = config.get(_ZERO)
    if isinstance(zero, bool):  # the oldest form
        return int(zero)
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return int(stage) if str(stage) in ("1", "2", "3", "1.0", "2.0", "3.0") else 0
