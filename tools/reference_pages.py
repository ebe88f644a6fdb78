"""Pages of docs/reference that are made from the code whenever the documentation is built.

`pages()` returns them as Markdown; `tools/mkdocs_hooks.py` hands them to MkDocs.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ROOT / "docs/reference/documents.schema.json"
"""Of the documents that have no schema of their own in the package."""
_REF = "#/components/schemas/"
_HOLDS = {"items": "[]", "additionalProperties": ".*"}
"""Of a schema, what describes the values of a list or an object, and how their names are written."""


def pages() -> dict[str, str]:
    """Markdown by path below docs/."""
    return {path: make() for path, make in makers().items()}


def makers() -> dict[str, Callable[[], str]]:
    """What makes each page, by path below docs/."""
    return {
        "reference/command-line.md": _command_line,
        "reference/settings.md": _settings,
        "reference/ds-config.md": _ds_config_section,
        "reference/environment.md": _environment,
        "reference/json.md": _json_documents,
        "reference/http.md": _http,
        "reference/exit-codes.md": _exit_codes,
    }


# --- the command line -------------------------------------------------------------------------------------------------


def _command_line() -> str:
    from zftune.cli.main import app

    parts = ["# Which commands and options are there?", "For anyone who looks up an option: `--help` prints the same."]
    parts += _command(typer.main.get_command(app), ["zftune"])
    return "\n\n".join(parts) + "\n"


def _command(command: Any, words: list[str]) -> Iterator[str]:
    commands: Mapping[str, Any] = getattr(command, "commands", {})
    if len(words) > 1:
        yield f"{'#' * min(len(words), 4)} {' '.join(words)}"
    yield inspect.cleandoc(command.help or "")
    options = [one for one in command.params if one.name != "help"]
    if len(words) > 1 or not commands:
        yield f"```text\n{' '.join([*words, *_usage(command)])}\n```"
    if options:
        rows = [(_flags(one), _type(one), _help(one)) for one in options]
        yield _table(("argument or option", "value", "meaning"), rows)
    for name, inner in commands.items():
        yield from _command(inner, [*words, name])


def _usage(command: Any) -> Iterator[str]:
    if any(one.param_type_name == "option" for one in command.params):
        yield "[OPTIONS]"
    yield from (_metavar(one) for one in command.params if one.param_type_name == "argument")
    if getattr(command, "commands", None):
        yield "COMMAND"


def _flags(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    return ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))


def _metavar(parameter: Any) -> str:
    name: str = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith(("[", "--")) else f"[{name}]"


def _type(parameter: Any) -> str:
    if parameter.param_type_name == "argument" or parameter.is_flag:
        return ""
    kind = parameter.type_descriptor.annotation.__name__
    return str(parameter.metavar or {"int": "integer", "float": "number", "str": "text"}.get(kind, kind))


def _help(parameter: Any) -> str:
    text = (parameter.help or "").strip()
    if (
        parameter.default not in (None, False, (), [])
        and getattr(parameter, "show_default", False)
        and "efault" not in text
    ):
        text += f" Default: {parameter.default}."
    return text + (" Required." if parameter.required and parameter.param_type_name == "option" else "")


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings() -> str:
    from zenflow import config
    from zenflow.config import LIVE_KNOBS, ZenFlowConfig

    docs = field_docs(ZenFlowConfig)
    elsewhere: Mapping[str, str] = vars(config)["_IN_DS_CONFIG"]
    nowhere: Iterable[str] = vars(config)["_NOT_IN_SECTION"]
    parts = [
        "# What does each setting of ZenFlowConfig do?",
        (
            "For anyone who chooses settings by hand, in Python or in a ds_config. All are arguments of"
            " `zenflow.ZenFlowConfig`; those marked *live* change during training by `optimizer.set_knobs(...)`."
            " Pictures and reasons are in [windows, selection and replay](../explanation/windows.md)."
        ),
    ]
    for field in dataclasses.fields(ZenFlowConfig):
        place = elsewhere.get(field.name, "" if field.name in nowhere else f"zero_optimization.zenflow.{field.name}")
        facts = [f"type `{field.type!s}`", f"default `{field.default!r}`"]
        facts += ["live"] if field.name in LIVE_KNOBS else ["fixed at the start"]
        facts += [f"in a ds_config: `{place}`" if place else "not in a ds_config"]
        parts += [f"## {field.name}", docs[field.name], "*" + "; ".join(facts) + "*"]
    return "\n\n".join(parts) + "\n"


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The sentence under each field of a dataclass."""
    (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            found[one.target.id] = " ".join(str(after.value.value).split())
    return found


def _ds_config_section() -> str:
    from zftune.integrations.deepspeed.section import FIELDS, Section

    docs, fields = field_docs(Section), {field.name: field for field in dataclasses.fields(Section)}
    rows = [(f"`{name}`", f"`{fields[name].type}`", docs.get(name, "")) for name in FIELDS]
    example = {"zftune": {"preset": "best", "quality": "published", "online": True}}
    parts = [
        '# What may stand in the "zftune" section of a ds_config?',
        (
            "For anyone who keeps zftune's settings beside DeepSpeed's. The section is at the top level of the file;"
            " options of `zftune run` override it, and DeepSpeed itself ignores it."
            " [Train a DeepSpeed script](../how-to/deepspeed.md) shows how it is used."
        ),
        f"```json\n{json.dumps(example, indent=2)}\n```",
        _table(("field", "type", "meaning"), rows),
        'No value may be the word "auto", which Hugging Face replaces with its own.',
    ]
    return "\n\n".join(parts) + "\n"


# --- environment, exit codes ------------------------------------------------------------------------------------------


def _environment() -> str:
    from zenflow.names import VARIABLES
    from zftune.variables import PUBLIC

    rows = [(f"`{name}`", text) for name, text in (PUBLIC | VARIABLES).items()]
    parts = [
        "# Which environment variables are read?",
        "For anyone who sets up jobs, containers or services. A variable with a similar name gets a warning.",
        _table(("variable", "meaning"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def _exit_codes() -> str:
    from zftune.cli.main import EXIT_CODES

    rows = [(str(code), text) for code, text in EXIT_CODES.items()]
    parts = [
        "# What do the exit codes mean?",
        "For anyone who calls `zftune` from a script.",
        _table(("code", "meaning"), rows),
        "`zftune profile -- CMD`, `zftune run -- CMD` end with the exit code of CMD, 128 + n where signal n ended it.",
    ]
    return "\n\n".join(parts) + "\n"


# --- documents --------------------------------------------------------------------------------------------------------


def _json_documents() -> str:
    page = (ROOT / "docs/reference/json.md").read_text(encoding="utf-8").strip()
    parts = [page.rpartition("\n\n")[0]]  # without the line that says so
    served = openapi()["components"]["schemas"]
    for name, (schema, definitions) in sorted(_document_schemas().items()):
        parts += [f"## {name}", schema.get("description", ""), *_schema_table(schema, {**definitions, **served})]
    return "\n\n".join(part for part in parts if part) + "\n"


def json_schemas() -> set[str]:
    """The names of all documents that commands write."""
    return set(_document_schemas())


def _document_schemas() -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The schema of each document and the definitions that it refers to, by its field "schema"."""
    found = {}
    for path in (DOCUMENTS, *(ROOT / "zftune").rglob("*.schema.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        definitions = schema.get("$defs", {})
        for one in (schema, *definitions.values()):
            if one.get("title", "").startswith("zftune."):
                found[one["title"]] = one, definitions
    return found


def _schema_table(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    rows = list(_fields(schema, definitions, "", {}))
    if rows:
        yield _table(("field", "type", "meaning"), rows)


def _fields(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str, listed: dict[int, str]
) -> Iterator[tuple[str, str, str]]:
    """Rows for all fields of an object and of those in it: `a.b`, `a[].b` in a list, `a.*.b` under any name.

    Args:
        schema: of the object.
        definitions: that it refers to.
        prefix: of its fields' names.
        listed: where the fields of an object stand already; they are not listed twice.
    """
    for name, given in _properties(schema, definitions).items():
        path = f"{prefix}{name}"
        meaning = _meaning(given, definitions)
        if not meaning and prefix.endswith("knobs."):
            meaning = f"[The setting of that name](settings.md#{name})."
        inner, suffix = _innermost(given, definitions)
        first = listed.setdefault(id(inner), f"{path}{suffix}") if _properties(inner, definitions) else ""
        is_new = first == f"{path}{suffix}"
        again = f" Its fields are those of `{first}`." if first and not is_new else ""
        yield f"`{path}`", _shape(given, definitions), f"{meaning}{again}".strip()
        if is_new:
            yield from _fields(inner, definitions, f"{first}.", listed)


def _meaning(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A field's own description, or that of what it refers to."""
    one = _resolved(schema, definitions)
    told = (_meaning(option, definitions) for option in one.get("anyOf", ()))
    return schema.get("description") or one.get("description") or next(filter(None, told), "")


def _properties(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an object, with those of what it extends."""
    found = dict(schema.get("properties", {}))
    for part in schema.get("allOf", ()):
        found |= _properties(_resolved(part, definitions), definitions)
    return found


def _innermost(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], suffix: str = ""
) -> tuple[Mapping[str, Any], str]:
    """The object that a field is or holds, and what its name gets for that; an object without fields: it holds none."""
    one = _resolved(schema, definitions)
    inside = [(option, suffix) for option in one.get("anyOf", ())]
    inside += [(one[key], suffix + mark) for key, mark in _HOLDS.items() if isinstance(one.get(key), Mapping)]
    if _properties(one, definitions):
        return one, suffix
    found = (_innermost(part, definitions, mark) for part, mark in inside)
    return next((each for each in found if each[0]), ({}, ""))


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return definitions.get(reference.rsplit("/", 1)[1], {}) if reference else schema


def _shape(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    one = _resolved(schema, definitions)
    if "const" in one:
        return json.dumps(one["const"])
    if "enum" in one:
        return " or ".join(json.dumps(value) for value in one["enum"])
    if "anyOf" in one:
        return " or ".join(dict.fromkeys(_shape(option, definitions) for option in one["anyOf"]))
    kind = one.get("type", "any")
    if isinstance(kind, list) and "array" in kind:
        return " or ".join(_shape({**one, "type": each}, definitions) for each in kind)
    if kind == "array":
        items = one.get("items")
        return f"list of {_one_word(_shape(items, definitions))}" if isinstance(items, Mapping) else "list"
    words = [str(each) for each in (kind if isinstance(kind, list) else [kind])]
    if isinstance(one.get("additionalProperties"), Mapping):
        inner = _one_word(_shape(one["additionalProperties"], definitions))
        words = [f"object of {inner}" if each == "object" else each for each in words]
    return " or ".join(words)


def _one_word(shape: str) -> str:
    return f"({shape})" if " or " in shape else shape


# --- HTTP -------------------------------------------------------------------------------------------------------------


def openapi() -> dict[str, Any]:
    """The daemon's own description, as /v1/openapi.json has it, with what the code says of each field that it shows."""
    from zftune.daemon.runs import views
    from zftune.daemon.runs.api import Runs
    from zftune.daemon.runs.registry import Registry
    from zftune.daemon.server.answers import DaemonState
    from zftune.daemon.server.app import create_app
    from zftune.daemon.server.sampling import Metrics, Node
    from zftune.store import open_store

    state = DaemonState(services=(Runs(Registry(open_store), Node(list)),))
    app, body = create_app(state, Metrics(state)), b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/openapi.json",
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }

    async def ask() -> None:
        await app(scope, receive, send)

    asyncio.run(ask())
    described: dict[str, Any] = json.loads(body)
    for name, schema in described["components"]["schemas"].items():
        shown = getattr(views, name, None)
        docs = field_docs(shown) if isinstance(shown, type) and dataclasses.is_dataclass(shown) else {}
        for field, text in docs.items():
            schema["properties"][field].setdefault("description", text)
    return described


def _http() -> str:
    described = openapi()
    schemas = described["components"]["schemas"]
    parts = [
        "# What does the daemon's HTTP interface offer?",
        (
            "For anyone who talks to the daemon from another program. It is HTTP with JSON over the Unix socket that"
            " `zftune daemon status` names; `/v1/openapi.json` there is this page for machines."
            ' A refused request is answered by one sentence, `{"error": "..."}`.'
        ),
    ]
    used: dict[str, None] = {}
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            parts.append(f"## {method.upper()} {path}")
            told = (about.get("description") or about.get("summary", "")).strip()
            parts.append(told if told.endswith(".") else "")  # else made of a function's name
            rows = [(f"`{one['name']}`", one["in"], one.get("description", "")) for one in about.get("parameters", ())]
            if rows:
                parts.append(_table(("parameter", "in", "meaning"), rows))
            body = _name_of(about.get("requestBody", {}))
            answer = _name_of(next(one for code, one in about["responses"].items() if code.startswith("2")))
            for word, name in (("Takes", body), ("Answers with", answer)):
                if name in schemas:
                    parts.append(f"{word} [{name}](#{name.lower()}).")
                    used[name] = None
    for name in used:
        parts += [f"## {name}", schemas[name].get("description", ""), *_schema_table(schemas[name], schemas)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name_of(part: Mapping[str, Any]) -> str:
    found = re.search(rf'"{re.escape(_REF)}(\w+)"', json.dumps(part))
    return found[1] if found else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def _cell(text: str) -> str:
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;") if "`" not in flat else flat.replace("|", "\\|")
