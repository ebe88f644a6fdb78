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
_REF = "#/components/schemas/"


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
    schemas = {}
    for path in (ROOT / "zftune").rglob("*.schema.json"):
        schema = json.loads(path.read_text(encoding="utf-8"))
        schemas[schema["title"]] = schema
    for name, keys in sorted(({key: list[str]() for key in schemas} | _written()).items()):
        parts.append(f"## {name}")
        if name in schemas:
            parts += [
                schemas[name].get("description", ""),
                *_schema_table(schemas[name], schemas[name].get("$defs", {})),
            ]
        else:
            command, *fields = keys
            writer = f"Written by `{command}`. " if command else ""
            parts.append(f"{writer}Fields: " + ", ".join(f"`{key}`" for key in fields) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def json_schemas() -> set[str]:
    """The names of all documents that commands write."""
    files = (ROOT / "zftune").rglob("*.schema.json")
    return {*(json.loads(path.read_text(encoding="utf-8"))["title"] for path in files), *_written()}


def _written() -> dict[str, list[str]]:
    """The command that writes each document and its fields, by its field "schema": from the dicts in the code."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "zftune").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.targets[0].id: str(node.value.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "schema":
                    name = value.value if isinstance(value, ast.Constant) else names.get(getattr(value, "id", ""), "")
                    keys = [str(one.value) for one in node.keys if isinstance(one, ast.Constant)]
                    if str(name).startswith("zftune."):
                        found.setdefault(str(name), [_writer(path)])
                        found[str(name)] += [one for one in keys if one not in found[str(name)]]
    return found


def _writer(path: Path) -> str:
    """The command whose code is in a file, or else in its folder; "" where there is none."""
    from zftune.cli.main import app

    folders = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        one = next(iter(getattr(command, "commands", {}).values()), command)
        module = ROOT.joinpath(*inspect.unwrap(one.callback).__module__.split("."))
        folders[module.with_suffix(".py")] = folders[module.parent] = f"zftune {name}"
    return next((folders[one] for one in (path, *path.parents) if one in folders), "")


def _schema_table(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    rows = list(_fields(schema, definitions, ""))
    if rows:
        yield _table(("field", "type", "meaning"), rows)


def _fields(schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, given in schema.get("properties", {}).items():
        one = _resolved(given, definitions)
        yield f"`{prefix}{name}`", _shape(given, definitions), given.get("description") or one.get("description", "")
        inner = one
        for option in one.get("anyOf", ()):
            inner = inner if "properties" in inner else _resolved(option, definitions)
        if prefix.count(".") < 2:
            yield from _fields(inner, definitions, f"{prefix}{name}.")


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
    if kind == "array":
        items = one.get("items")
        return f"list of {_shape(items, definitions)}" if isinstance(items, Mapping) else "list"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


# --- HTTP -------------------------------------------------------------------------------------------------------------


def openapi() -> dict[str, Any]:
    """The daemon's own description, as /v1/openapi.json has it."""
    from zftune.daemon.runs.api import Runs
    from zftune.daemon.runs.registry import Registry
    from zftune.daemon.server.answers import DaemonState
    from zftune.daemon.server.app import create_app
    from zftune.daemon.server.sampling import Metrics, Node

    state = DaemonState(services=(Runs(Registry(None), Node(list)),))
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
