from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zftune.errors import BadInputError
from zftune.workload.text import DEFAULT_TEXT, ByteTokenizer, load_text


def test_default_is_the_standard_library_in_one_order() -> None:
    corpus = load_text(max_bytes=200_000)
    assert corpus == load_text(max_bytes=200_000)
    assert corpus.name == DEFAULT_TEXT
    assert len(corpus.data) == 200_000
    assert corpus.truncated
    assert b"import " in corpus.data


def test_folder_is_read_in_order_without_binaries_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("zwei ä")
    (tmp_path / "a.txt").write_text("one ")
    (tmp_path / "weights.bin").write_bytes(b"\x00\x01text")
    (tmp_path / "latin.txt").write_bytes(b"gr\xfc\xdfe an alle")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = load_text(tmp_path)
    assert corpus.data == "one zwei ä".encode()
    assert (corpus.name, corpus.files, corpus.truncated) == (tmp_path.name, 2, False)


def test_file_is_cut_at_the_cap_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("x" * 100)
    assert not load_text(file, max_bytes=100).truncated
    corpus = load_text(file, max_bytes=99)
    assert (len(corpus.data), corpus.truncated) == (99, True)


def test_text_may_be_cut_inside_a_character(tmp_path: Path) -> None:
    file = tmp_path / "umlaut.txt"
    file.write_text("ä" * 10_000)
    assert len(load_text(file, max_bytes=101).data) == 101


@pytest.mark.parametrize("name", ["missing.txt", "empty.txt", "empty", "binary.bin"])
def test_what_holds_no_text_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)))
    with pytest.raises(BadInputError, match=r"^--text '.*'.*(give|neither)") as caught:
        load_text(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_device_file_is_not_read() -> None:
    with pytest.raises(BadInputError, match="neither a file nor a folder"):
        load_text("/dev/zero")


def test_bytes_are_tokens() -> None:
    tokens = ByteTokenizer().encode("aä".encode())
    assert tokens.tolist() == [0x61, 0xC3, 0xA4]
    assert tokens.dtype == torch.uint8
    assert ByteTokenizer().encode(b"").numel() == 0
