"""Files as DeepSpeed reads them, and as Hugging Face does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.check.cases import safe
from zftune.ds_config.reading import filled, is_hugging_face, leaves, read
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.check.checking import check


def written(folder: Path, text: str) -> str:
    path = folder / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def rules(source: Any) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in check(source, backend=None, version="0.19.6").findings}


def test_plain_json(tmp_path: Path) -> None:
    source = read(written(tmp_path, json.dumps(safe("zero2-offload"))))
    assert (source.config, source.duplicates, source.flaw) == (safe("zero2-offload"), (), None)


def test_comments_are_hjson_which_hugging_face_does_not_read(tmp_path: Path) -> None:
    hjson = pytest.importorskip("hjson", reason="comes with DeepSpeed")
    text = json.dumps(safe("zero2-offload"), indent=1).replace("{", "{ # a comment\n", 1)
    source = read(written(tmp_path, text))
    assert source.config == safe("zero2-offload") == json.loads(json.dumps(hjson.loads(text)))
    assert rules(source)["not-json"] == "note"
    trainer = json.dumps(safe("hugging-face"), indent=1).replace("{", "{ # a comment\n", 1)
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(trainer)
    assert rules(read(written(tmp_path, trainer)))["not-json"] == "crashes"


@pytest.mark.parametrize("comment", ["", "# a comment\n"])
def test_a_name_that_stands_twice(tmp_path: Path, comment: str) -> None:
    pytest.importorskip("hjson", reason="comes with DeepSpeed")
    text = '{"train_batch_size": 1,\n' + comment + '"zero_optimization": {"stage": 1, "stage": 2}}'
    source = read(written(tmp_path, text))
    assert source.duplicates == ("stage",)
    assert source.config["zero_optimization"] == {"stage": 2}
    assert rules(source)["duplicate-name"] == "crashes"


def test_nan_is_a_word_to_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("hjson", reason="comes with DeepSpeed")
    source = read(written(tmp_path, '{"optimizer": {"params": {"lr": NaN\n}}, "steps_per_print": 1}'))
    assert source.config["optimizer"]["params"]["lr"] == "NaN"
    assert rules(source)["not-a-number"] == "crashes"
    assert rules({"train_batch_size": 1, "steps_per_print": float("inf")}) == {}  # as Accelerate writes it


@pytest.mark.parametrize("text", ["[1]", "hello", "", '{"a": ', "{]"])
def test_what_is_no_ds_config(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match="give a ds_config") as raised:
        read(written(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("none.json", "", "binary"):
        with pytest.raises(BadInputError, match="cannot be read"):
            read(str(tmp_path / name))


def test_hugging_face_is_told_by_its_word() -> None:
    assert is_hugging_face(safe("hugging-face"))
    assert not is_hugging_face(safe("zero2-offload"))
    assert not is_hugging_face({"zero_optimization": {"zenflow": {"update_interval": "auto"}}})
    assert [value for _, value in leaves(filled(safe("hugging-face"))) if value == "auto"] == []
