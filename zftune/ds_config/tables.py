"""What each version of DeepSpeed takes in a ds_config: tables that tools/deepspeed_tables.py has written.

Importing DeepSpeed takes seconds, so its pydantic models are described in the tables and built again from there; what
it reads by plain code was found by asking it for a value of each kind.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, create_model

PATH = Path(__file__).with_name("tables.json")

ASKED = ("compression_training", "data_efficiency", "elasticity", "curriculum_learning", "expert_parallel")
"""Sections that are read by long code: the installed DeepSpeed is asked about a ds_config that switches one on."""

KINDS: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "positive": 3,
    "negative": -3,
    "fraction": 0.5,
    "word": "unheard_of",
    "empty word": "",
    "words": ["unheard_of"],
    "list": [2],
    "empty list": [],
    "object": {"unheard_of": 1},
    "empty object": {},
}
"""A value of each kind. Plain code tells them apart by what fails on them: `.get`, `.lower()`, a comparison."""

WORDS = (
    "fp16", "fp32", "bf16", "float16", "float32", "bfloat16", "half", "float", "int8", "torch.float16", "torch.float32",
    "torch.bfloat16", "torch.int8", "mean", "sum", "ignore", "warn", "fail", "dense", "fixed", "variable", "bigbird",
    "bslongformer", "normal", "fast", "replica", "socket", "machine", "best", "auto",
)  # fmt: skip
"""That some setting takes where it does not take any word."""

_BATCH: dict[str, Any] = {"train_batch_size": 8}
_ZENFLOW = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}
RELATIONS: dict[str, dict[str, Any]] = {
    "two dtypes": {**_BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
    "fp16 masters": {**_BATCH, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    "bf16 masters": {**_BATCH, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16 states": {**_BATCH, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "sum at stage 3": {**_BATCH, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
    "sum with ZenFlow": {**_BATCH, "gradient_allreduce_op": "sum", "zero_optimization": _ZENFLOW},
    "sum with DeepCompile": {**_BATCH, "gradient_allreduce_op": "sum", "compile": {"deepcompile": True}},
    "no sequences in parallel": {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 0},
    "torch's optimizers are untested": {**_BATCH, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}},
}
"""Settings that some versions refuse together, an example each."""


@dataclass(frozen=True)
class Table:
    """What one version takes."""

    version: str
    sections: Mapping[str, type[BaseModel]]
    """With dots: by which model a section is read."""
    checks: Mapping[str, tuple[str, ...]]
    """Of each model, by name: code of DeepSpeed's that looks at its values."""
    plain: Mapping[str, Mapping[str, Any]]
    """With dots: what is taken of a setting that is read by plain code, where that is not everything."""
    names: frozenset[str]
    """At the top level, that are read at all."""
    optimizers: Mapping[str, tuple[str, ...]]
    """Settings of each class."""
    own_optimizers: tuple[str, ...]
    """Names that stand for one of DeepSpeed's, in any case; others are torch's."""
    removed: frozenset[str]
    """With dots: settings that older versions had, refused by name."""
    relations: frozenset[str]
    models: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """As they are described."""


@functools.cache
def versions() -> tuple[str, ...]:
    """That a table is about, the oldest first."""
    return tuple(_tables()["versions"])


@functools.cache
def table(version: str) -> Table | None:
    """The table of a version; None: there is none.

    Args:
        version: such as "0.19.6".
    """
    version = version.partition("+")[0]
    digests = _tables()["versions"].get(version)
    if digests is None:
        return None
    parts = {name: _tables()["parts"][digest] for name, digest in digests.items()}
    models = {name.removeprefix("model "): part for name, part in parts.items() if name.startswith("model ")}
    built: dict[str, type[BaseModel]] = {}
    return Table(
        version=version,
        sections={dotted: _build(name, models, built) for dotted, name in parts["sections"].items()},
        checks={name: tuple(model["checks"]) for name, model in models.items()},
        plain=parts["plain"],
        names=frozenset(parts["names"]),
        optimizers={name: tuple(settings) for name, settings in parts["optimizers"].items()},
        own_optimizers=tuple(parts["own_optimizers"]),
        removed=frozenset(parts["removed"]),
        relations=frozenset(parts["relations"]),
        models=models,
    )


def newest() -> Table:
    """The table of the last version that there is one of."""
    found = table(versions()[-1])
    assert found is not None
    return found


@functools.cache
def known_names(section: tuple[str, ...]) -> frozenset[str]:
    """Names that a section may hold, in any version; of the top level where it has no name.

    Args:
        section: its own names, from the top level on.
    """
    found: set[str] = set()
    for digests in _tables()["versions"].values():
        found |= _names_in({name: _tables()["parts"][digest] for name, digest in digests.items()}, section)
    return frozenset(found)


def _names_in(parts: Mapping[str, Any], section: tuple[str, ...]) -> set[str]:
    if not section:
        return {*parts["names"], *ASKED}
    if section in (("optimizer",), ("scheduler",)):
        return {"type", "params", *(("legacy_fusion",) if section == ("optimizer",) else ())}
    dotted = ".".join(section)
    listed = (*parts["plain"], *parts["sections"], *parts["removed"])
    found = {name.removeprefix(f"{dotted}.").partition(".")[0] for name in listed if name.startswith(f"{dotted}.")}
    if section == ("scheduler", "params"):
        found |= {name.split(".")[2] for name in listed if name.startswith("scheduler.")}
    if section == ("optimizer", "params"):
        found |= {setting for settings in parts["optimizers"].values() for setting in settings}
    for depth in range(len(section), 0, -1):
        model: str | None = parts["sections"].get(".".join(section[:depth]))
        if model is not None:
            for name in section[depth:]:
                inner = None if model is None else fields_of(parts[f"model {model}"]).get(name)
                model = None if inner is None else model_in(inner["type"])
            return found if model is None else found | set(fields_of(parts[f"model {model}"]))
    return found


def fields_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a described model, under their names and aliases."""
    named = model["fields"].items()
    return {**{one["alias"]: one for _, one in named if one.get("alias")}, **dict(named)}


def model_in(described: Any) -> str | None:
    """Which model a described type has in it; None: none."""
    if isinstance(described, str):
        return None
    if "model" in described:
        return str(described["model"])
    return next((found for one in described.get("any_of", ()) if (found := model_in(one))), None)


@functools.cache
def _tables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


class Section(BaseModel):
    """A section as DeepSpeed's base class reads it: unknown names are refused, and the word "auto" is dropped."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, arbitrary_types_allowed=True, use_enum_values=True)

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: value for name, value in values.items() if value != "auto"})


def _build(name: str, models: Mapping[str, Any], built: dict[str, type[BaseModel]]) -> type[BaseModel]:
    if name not in built:
        fields: dict[str, Any] = {
            field_name: (
                _type(one["type"], models, built),
                Field(
                    ... if one.get("required") else one.get("default"), alias=one.get("alias"), **one.get("bounds", {})
                ),
            )
            for field_name, one in models[name]["fields"].items()
        }
        built[name] = create_model(name, __base__=Section, **fields)
    return built[name]


_NAMED: dict[str, Any] = {
    "none": None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "object": Any,
    "path": Path,
    "other": type("NotOfJson", (), {}),
}


def _type(described: Any, models: Mapping[str, Any], built: dict[str, type[BaseModel]]) -> Any:
    if isinstance(described, str):
        return _NAMED[described]
    ((kind, inner),) = ((key, value) for key, value in described.items() if key != "base")
    if kind == "model":
        return _build(inner, models, built)
    if kind == "literal":
        return Literal[tuple(inner)]
    if kind == "enum":
        base = {"int": int, "str": str, None: object}[described["base"]]
        members = {f"member{number}": value for number, value in enumerate(inner)}
        return enum.Enum("Choice", members, type=None if base is object else base)
    parts = tuple(_type(one, models, built) for one in inner)
    if kind == "any_of":
        return Union[parts]  # noqa: UP007 - of a tuple
    return dict[parts] if kind == "dict" else list[parts[0]]  # type: ignore[misc, valid-type]


def kind_of(value: Any) -> str:
    """Which of `KINDS` a value is of."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        if value == 0:
            return "zero"
        if value < 0:
            return "negative"
        return "positive" if value == value and (isinstance(value, int) or value.is_integer()) else "fraction"
    if isinstance(value, str):
        return "word" if value else "empty word"
    if isinstance(value, list):
        return "empty list" if not value else "words" if all(isinstance(one, str) for one in value) else "list"
    return "object" if value else "empty object"
