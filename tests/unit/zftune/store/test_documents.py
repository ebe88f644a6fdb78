"""Exports tell nothing of whose they are; what is wrong with a file is one sentence, and changes nothing."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.store.examples import HARDWARE, MODEL, PRESET
from zftune.errors import BadInputError, StoreError
from zftune.store.preset_file import MAX_BYTES, SCHEMA_NAME, check_preset, document_of, escaped, read_preset
from zftune.store.store import Store

GOOD = document_of(replace(PRESET, name="theirs"))


ABSENT = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good document with another value at a dotted path, or none there."""
    document: Any = copy.deepcopy(GOOD)
    *folders, last = path.split(".")
    inner = document
    for folder in folders:
        inner = inner[folder]
    inner[last] = value
    if value is ABSENT:
        del inner[last]
    return dict(document)


def text_with(old: str, new: str) -> str:
    text = json.dumps(GOOD)
    assert old in text
    return text.replace(old, new, 1)


def nested(depth: int) -> str:
    return json.dumps(GOOD)[:-1] + ', "more": ' + "[" * depth + "]" * depth + "}"


HOSTILE: dict[str, Any] = {
    # not JSON, or not only
    "empty": b"",
    "not JSON": b"topk_ratio = 0.1",
    "cut off": json.dumps(GOOD).encode()[:-5],
    "two documents": json.dumps(GOOD).encode() * 2,
    "Python": repr(GOOD).encode(),
    "gzip": gzip.compress(json.dumps(GOOD).encode()),
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "broken UTF-8": json.dumps(GOOD).encode().replace(b"theirs", b"the\xff\xfers"),
    "null bytes": b"\0" * 1000,
    "2 MiB of spaces": json.dumps(GOOD).encode() + b" " * (2 << 20),
    "2 MiB of text": json.dumps(changed("model.name", "x" * (2 << 20))).encode(),
    "pickle": b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93",
    # not a preset
    "a list": b"[]",
    "a string": b'"zftune.preset/1"',
    "null": b"null",
    "a number": b"1e400",
    "an empty object": {},
    "another schema": changed("schema", "zftune.profile/1"),
    "a newer schema": changed("schema", "zftune.preset/2"),
    # numbers that are none
    "NaN": text_with("800.0", "NaN"),
    "infinity": text_with("800.0", "-Infinity"),
    "1e999": text_with("800.0", "1e999"),
    "an integer of 5,000 digits": text_with("800.0", "9" * 5000),
    "an integer out of range": changed("key.micro_batch", 1 << 70),
    "a float for an integer": changed("knobs.update_interval", 4.0),
    "a boolean for an integer": changed("knobs.update_interval", True),
    "a string for a number": changed("knobs.topk_ratio", "0.1"),
    "below the range": changed("knobs.topk_ratio", -0.1),
    "above the range": changed("knobs.topk_ratio", 1.5),
    "zero steps": changed("evidence.steps", 0),
    "a step of no time": changed("evidence.step_ms", 0),
    "a negative world size": changed("key.world_size", -1),
    # text
    "a path for a name": changed("name", "../../etc/passwd"),
    "an absolute path for a name": changed("name", "/etc/passwd"),
    "dots in a name": changed("name", "a..b"),
    "a reserved name": changed("name", "best"),
    "a name like a file": changed("name", "theirs.json"),
    "a name like an option": changed("name", "--yes"),
    "an empty name": changed("name", ""),
    "a long name": changed("name", "x" * 65),
    "a new line after a name": changed("name", "theirs\n"),
    "a terminal's control": changed("model.name", "\x1b[2J\x1b]0;owned\x07"),
    "text from right to left": changed("hardware.gpu", "A100\u202egnp.exe"),
    "a half of a character": changed("model.name", "\ud800"),
    "text that is not to be seen": changed("model.name", "Llama\u200b"),
    "a null character": changed("model.name", "Llama\0"),
    "a new line in a key": {**GOOD, "a\nb": 1},
    "letters of another alphabet in a name": changed("name", "thеirs"),
    "long text": changed("hardware.cpu_model", "x" * 101),
    "SQL for an identity": changed("key.model_id", "'; DROP TABLE --"),
    "a version with a path": changed("versions.torch", "/home/somebody/torch"),
    # shape
    "an extra field": {**GOOD, "user": "somebody"},
    "an extra knob": changed("knobs.max_grad_norm", 1.0),
    "a knob of Python's": changed("knobs.__class__", "x"),
    "a missing field": changed("evidence", ABSENT),
    "a missing knob": changed("knobs.topk_ratio", ABSENT),
    "knobs as a list": changed("knobs", [["topk_ratio", 0.1]]),
    "null for what must be": changed("key.hw_id", None),
    "an array for text": changed("name", ["theirs"]),
    "the same key twice": text_with('"name": "theirs"', '"name": "theirs", "name": "others"'),
    "nested 100 deep": nested(100),
    "nested 100,000 deep": nested(100_000),
    "too many versions": changed("versions", {f"p{number}": "1" for number in range(17)}),
    "knobs that do not go together": changed("knobs.apply_lag", 9),
    "a strategy that needs epochs": changed("knobs.select_strategy", "epoch"),
    "bytes for petabytes": changed("hardware.ram_bytes", 1 << 60),
}


def link(path: Path) -> None:
    path.with_name("real").write_text(json.dumps(GOOD))
    path.symlink_to("real")


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a link": lambda path: link(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
}


def refused(store: Store, path: Path) -> str:
    """The sentence; the store is as it was."""
    with pytest.raises(BadInputError) as caught:
        store.save_preset(read_preset(path))
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 600
    assert f"it must be a file that `zftune presets export` wrote ({SCHEMA_NAME})" in message
    assert store.presets() == []
    return message


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from zftune.store import open_store

    with open_store(str(tmp_path_factory.mktemp("store") / "zftune.db")) as store:
        yield store


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(empty: Store, tmp_path: Path, name: str) -> None:
    content = HOSTILE[name]
    if isinstance(content, dict):
        content = json.dumps(content)
    path = tmp_path / "preset.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(empty, path)


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file_is_refused(empty: Store, tmp_path: Path, name: str) -> None:
    path = tmp_path / "preset.json"
    SPECIAL[name](path)
    refused(empty, path)


def test_the_sentence_names_the_field_and_what_is_wrong(empty: Store, tmp_path: Path) -> None:
    path = tmp_path / "preset.json"
    path.write_text(json.dumps(changed("knobs.topk_ratio", 1.5)))
    assert "knobs.topk_ratio: 1.5 is greater than the maximum of 1" in refused(empty, path)
    path.write_text(json.dumps(changed("knobs.topk_ration", 0.1)))
    assert "has the field knobs.topk_ration, which there is not (did you mean topk_ratio)" in refused(empty, path)
    path.write_text(json.dumps(changed("model.name", "\x1b[2J")))
    assert "\\x1b[2J" in refused(empty, path)
    assert "/a\\nb': cannot be read" in refused(empty, tmp_path / "a\nb")


def test_what_is_exported_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "preset.json"
    path.write_text(json.dumps(GOOD))
    again = read_preset(path)
    assert again == replace(PRESET, name="theirs", imported=True)
    assert document_of(again) == GOOD


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "preset.json"
    text = json.dumps(GOOD)
    path.write_text(text + " " * (MAX_BYTES - len(text)))
    assert read_preset(path).name == "theirs"
    path.write_text(text + " " * (MAX_BYTES - len(text) + 1))
    with pytest.raises(BadInputError, match="larger than 1 MiB"):
        read_preset(path)


def test_an_export_tells_nothing_of_whose_it_is() -> None:
    preset = replace(
        PRESET,
        name="mine",
        model=replace(MODEL, name="/home/somebody/secret-project/llama"),
        hardware=replace(HARDWARE, cpu_model="AMD\tEPYC\n7742"),
        versions={**PRESET.versions, "os": "Linux 6.1-somebodys-host x86_64", "command": "--token=secret"},
    )
    text = json.dumps(document_of(preset))
    check_preset(preset)
    for secret in ("somebody", "secret", "home", "token", "Linux"):
        assert secret not in text
    assert document_of(preset)["model"]["name"] == "llama"
    assert document_of(preset)["hardware"]["cpu_model"] == "AMD EPYC 7742"


def test_what_cannot_be_exported_cannot_be_kept() -> None:
    with pytest.raises(StoreError, match="preset 'mine': knobs: "):
        check_preset(replace(PRESET, name="mine", knobs={**PRESET.knobs, "user": "somebody"}))


def test_text_is_written_out_where_it_could_do_harm() -> None:
    assert escaped("Qwen2.5 – Größe 7B 模型") == "Qwen2.5 – Größe 7B 模型"
    assert escaped("a\x1b[31m\u202e\n\ud800") == "a\\x1b[31m\\u202e\\n\\ud800"
