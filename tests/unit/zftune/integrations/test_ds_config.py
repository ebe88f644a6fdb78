"""One reading of a ds_config: every way in agrees with DeepSpeed's own; and a file that is changed stays as it was."""

from __future__ import annotations

import ast
import base64
import collections
import importlib.util
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zenflow import ConfigError, ZenFlowConfig
from zftune.checkpoint.zero import ds_config as of_checkpoint
from zftune.ds_config.reading import Source, put, read, read_given, require_unique, rewritten, stage_of
from zftune.ds_config.text import load, parse
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.check.checking import check
from zftune.integrations.deepspeed.command_line import named_by

ODD = {
    "plain": '{"zero_optimization": {"stage": 2}}',
    "a comment": '{ # two\n"zero_optimization": {"stage": 2}}',
    "no quotes, no braces": "zero_optimization: {stage: 2}\n",
    "a comma too many": '{"zero_optimization": {"stage": 2,},}',
    "single quotes": "{'zero_optimization': {'stage': 2}}",
    "a number as a float": '{"zero_optimization": {"stage": 2.0, "reduce_bucket_size": 5e8}}',
    "as a float in Hjson": "{zero_optimization: {stage: 2.0, reduce_bucket_size: 5e8}}",
    "a large float": '{"steps_per_print": 1e10}',
    "NaN": '{"gradient_clipping": NaN\n}',
    "Infinity": '{"steps_per_print": Infinity\n}',
    "a name twice": '{"zero_optimization": {"stage": 1, "stage": 2}}',
    "a name twice in Hjson": "{zero_optimization: {stage: 1, stage: 2}}",
    "a byte order mark": '\ufeff{"zero_optimization": {"stage": 2}}',
    "a list": "[1]",
    "a word": "hello",
    "half": '{"zero_optimization": {',
}
NOT_OBJECTS = ("a list", "a word")
"""DeepSpeed reads them, and ends with an error of Python where it looks for a setting."""


@pytest.fixture(scope="module")
def deepspeed() -> Callable[[Any], Any]:
    """How DeepSpeed reads what `initialize` is given: its own functions, without the seconds that an import takes."""
    hjson = pytest.importorskip("hjson", reason="comes with DeepSpeed")
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("DeepSpeed is not installed")
    names: dict[str, Any] = {"base64": base64, "collections": collections, "hjson": hjson, "os": os, "Union": Union}
    for file in ("runtime/config_utils.py", "runtime/tensor_parallel/init_utils.py"):
        tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
        wanted = ("dict_raise_error_on_duplicate_keys", "load_ds_config")
        tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in wanted]
        exec(compile(tree, file, "exec"), names)

    names["open"] = lambda path, _: io.StringIO(Path(path).read_text(encoding="utf-8"))  # it closes no file
    return names["load_ds_config"]  # type: ignore[no-any-return]


def reading(read: Callable[[], Any]) -> Any:
    """None where it is refused."""
    try:
        return read()
    except (ConfigError, BadInputError, ValueError, KeyError):
        return None


def checked(path: str) -> Any:
    source = read(path)
    refused = any(one.rule == "duplicate-name" for one in check(source, version="0.19.6").findings)
    return None if refused else source.config


def applied(source: Source) -> dict[str, Any]:
    require_unique(source)
    return source.config


@pytest.mark.parametrize("kind", ODD)
def test_every_way_in_reads_a_file_as_deepspeed_does(
    deepspeed: Callable[[Any], Any], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(ODD[kind], encoding="utf-8")
    path = str(file)
    theirs = None if kind in NOT_OBJECTS else reading(lambda: deepspeed(path))
    ways: dict[str, Callable[[], Any]] = {
        "check": lambda: checked(path),
        "run": lambda: applied(*named_by(["python", "train.py", "--deepspeed_config", path], {})),
        "apply": lambda: applied(read(path)),
        "initialize": lambda: read_given(path),
        "load": lambda: load(path),
        "a checkpoint": lambda: of_checkpoint({"ds_config": path}) or None,
    }
    found = {name: reading(way) for name, way in ways.items()}
    assert found == dict.fromkeys(ways, theirs)
    assert repr(found["load"]) == repr(None if theirs is None else json.loads(json.dumps(theirs)))


@pytest.mark.parametrize("kind", ODD)
def test_base64_is_read_as_deepspeed_does(deepspeed: Callable[[Any], Any], kind: str) -> None:
    text = base64.urlsafe_b64encode(ODD[kind].encode()).decode()
    theirs = None if kind in NOT_OBJECTS else reading(lambda: deepspeed(text))
    sources = list(named_by(["python", "train.py", "--deepspeed_config", text], {}))
    assert read_given(text) == theirs == next((source.config for source in sources), None)
    assert reading(lambda: load(text)) == theirs


@pytest.mark.parametrize("config", [None, 7, [], Path("ds_config.json"), b"{}"])
def test_what_deepspeed_does_not_take_is_left_to_it(deepspeed: Callable[[Any], Any], config: Any) -> None:
    assert read_given(config) is None
    with pytest.raises(ValueError, match="Expected a string path"):
        deepspeed(config)


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=4)
indents = st.sampled_from([None, 0, 2, 4, "\t"])


@settings(max_examples=30)
@given(objects, indents)
def test_json_is_hjson(value: dict[str, Any], indent: Any) -> None:
    hjson = pytest.importorskip("hjson", reason="comes with DeepSpeed")
    text = json.dumps(value, indent=indent)
    assert parse(text).flaw is None
    assert repr(parse(text).value) == repr(json.loads(json.dumps(hjson.loads(text))))


@pytest.mark.parametrize("count", [4.0, 4])
def test_a_whole_number_may_be_written_as_a_float(count: float) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": count, "select_interval": count}}
    config = ZenFlowConfig.from_ds_config({"gradient_accumulation_steps": count, "zero_optimization": offload})
    assert repr((config.update_interval, config.select_interval, config.gradient_accumulation_steps)) == "(4, 4, 4)"


TEXT = """{
    "train_batch_size":  1e1,

    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "zero_optimization": {
        "stage": 2.0,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true
    },
    "bf16": {}
}
"""


def changed(text: str, **changes: Any) -> str:
    source = Source(parse(text).value, "ds_config.json", text=text)
    config = json.loads(json.dumps(source.config))
    for dotted, value in changes.items():
        put(config, tuple(dotted.split("__")), value)
    made = rewritten(source, config)
    assert parse(made).value == config
    return made


def test_what_is_not_changed_stays_as_it_stands() -> None:
    assert changed(TEXT) == TEXT
    assert changed(TEXT, optimizer__params__lr=2e-5) == TEXT.replace("1e-5", "2e-05")
    made = changed(
        TEXT,
        zero_optimization__zenflow={"topk_ratio": 0.1, "update_interval": 4},
        zero_optimization__offload_optimizer__ratio=0.5,
        bf16__enabled=True,
    )
    assert made == TEXT.replace(
        '"overlap_comm": true\n',
        '"overlap_comm": true,\n        "zenflow": {\n            "topk_ratio": 0.1,\n'
        '            "update_interval": 4\n        }\n',
    ).replace('"pin_memory": true', '"pin_memory": true, "ratio": 0.5').replace("{}", '{\n      "enabled": true\n    }')


def test_a_file_on_one_line_stays_on_one() -> None:
    assert changed('{"a": 1, "b": {}}\n', c=2, b__d=[1]) == '{"a": 1, "b": {"d": [1]}, "c": 2}\n'


@settings(max_examples=30)
@given(objects, objects, indents)
def test_any_change_is_what_is_written(old: dict[str, Any], new: dict[str, Any], indent: Any) -> None:
    text = json.dumps(old, indent=indent)
    source = Source(parse(text).value, text=text)
    mixed = {**dict(list(source.config.items())[1:]), **parse(json.dumps(new)).value}
    made = parse(rewritten(source, mixed)).value
    assert json.dumps(made, sort_keys=True) == json.dumps(mixed, sort_keys=True)
    assert rewritten(source, source.config) == text


def test_what_is_not_plain_json_is_written_anew() -> None:
    for text in ("{ # a comment\n a: 1}", '{"a": 2, "a": 1}'):
        parsed = parse(text)
        source = Source(parsed.value, duplicates=parsed.duplicates, flaw=parsed.flaw, text=text)
        assert rewritten(source, source.config) == '{\n  "a": 1\n}\n'


@pytest.mark.parametrize(
    ("written", "stage"), [(2, 2), ("2", 2), (2.0, 2), (" 3 ", 3), ("auto", "auto"), ("two", "two"), (2.5, 2.5)]
)
def test_a_stage_is_read_as_deepspeed_reads_it(written: object, stage: object) -> None:
    assert stage_of({"zero_optimization": {"stage": written}}) == stage


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory"),
        (b"{", "it is neither JSON (line 1, column 2: expecting"),
        (b"", "it holds no JSON object"),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "it is not UTF-8 text"),
        (b"[1, 2]", "it holds no JSON object"),
        (b"3", "it holds no JSON object"),
        (b"null", "it holds no JSON object"),
        (b'{"a": 1, "a": 2}', "a stands twice"),
    ],
)
def test_a_bad_file_is_a_sentence(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"ds_config '{path}' cannot be read: {sentence}")
