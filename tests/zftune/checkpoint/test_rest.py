"""What lies in a folder beside the checkpoint goes along, whole or not at all, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tests import zygote
from tests.tiers import by_day
from tests.zftune.checkpoint.tiny import Tiny, groups_of, train
from zftune.checkpoint.converting import export_checkpoint, import_checkpoint
from zftune.checkpoint.sources import MODEL_STATES
from zftune.cli.main import app
from zftune.errors import BadInputError, ZftuneError

SCRIPT = "zero_to_fp32.py"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    model = Tiny()
    optimizer = torch.optim.AdamW(groups_of(model, named=True))
    list(train(model, optimizer, range(2)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


@pytest.fixture
def ours(plain: Path, tmp_path: Path) -> Path:
    """A folder of ours."""
    import_checkpoint(str(plain), str(tmp_path / "ours"))
    return tmp_path / "ours"


@pytest.fixture
def zero(ours: Path, tmp_path: Path) -> Path:
    """A folder of ZeRO."""
    export_checkpoint(str(ours), str(tmp_path / "zero"), to="zero")
    return tmp_path / "zero"


@pytest.fixture(params=["import", "export"])
def source(request: pytest.FixtureRequest) -> Path:
    """Of either direction."""
    found: Path = request.getfixturevalue("zero" if request.param == "import" else "ours")
    return found


def convert(source: Path, target: Path) -> Result:
    words = ["import"] if source.name == "zero" else ["export", "--to", "zero"]
    return CliRunner().invoke(app, ["checkpoint", *words, str(source), "-o", str(target), "--json", "-"])


def converted(source: Path, target: Path) -> dict[str, Any]:
    result = convert(source, target)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_files_go_along_as_they_are(source: Path, tmp_path: Path) -> None:
    (source / "adapter" / "deep").mkdir(parents=True)
    contents = {"trainer_state.json": b"{}", "adapter/deep/weights.bin": os.urandom(100_003), SCRIPT: b"# theirs"}
    for name, content in contents.items():
        (source / name).unlink(missing_ok=True)  # were the script there a link, this would write into DeepSpeed itself
        (source / name).write_bytes(content)
    (source / SCRIPT).chmod(0o755)
    done = converted(source, tmp_path / "new")
    assert sorted(done["copied"]) == sorted(contents)
    for name, content in contents.items():
        assert (tmp_path / "new" / name).read_bytes() == content
    assert os.access(tmp_path / "new" / SCRIPT, os.X_OK)
    with (tmp_path / "new" / "trainer_state.json").open("w") as file:  # as the Trainer writes it
        file.write("another")
    assert (source / "trainer_state.json").read_bytes() == b"{}"


def test_the_report_names_them(zero: Path, tmp_path: Path) -> None:
    (zero / "adapter").mkdir()
    (zero / "adapter" / "a.bin").touch()
    (zero / "adapter" / "b.bin").touch()
    assert f"Copied as they were: adapter, {SCRIPT}.\n" in convert(zero, tmp_path / "new").stderr


def test_a_link_is_followed_nowhere(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of others")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("of others")
    (source / "sub").mkdir()
    (source / "sub" / "model.bin").write_text("inner")
    links = {
        "model.bin": "sub/model.bin",
        "sub/again": "../model.bin",
        "tokenizer": "sub",
        "relative": "../secret",
        "absolute": str(source / "model.bin"),
        "back": f"../{source.name}/model.bin",
        "folder": str(tmp_path / "elsewhere"),
        "through": "folder/secret",
        "loop": "loop",
    }
    for name, words in links.items():
        (source / name).symlink_to(words)
    done, new = converted(source, tmp_path / "new"), tmp_path / "new"
    kept = ["loop", "model.bin", "sub/again", "sub/model.bin", "tokenizer"]
    assert sorted(done["copied"]) == sorted([*kept, SCRIPT])
    assert done["notes"] == [
        f"{name} is left out: it is a link that leads out of the folder"
        for name in ("absolute", "back", "folder", "relative", "through")
    ]
    assert (new / "tokenizer").readlink() == Path("sub")
    assert (new / "model.bin").is_symlink()
    assert (new / "sub" / "again").resolve() == (new / "sub" / "model.bin").resolve()
    assert not any("secret" in name for name in files_in(new))


def test_other_checkpoints_stay_where_they_are(source: Path, tmp_path: Path) -> None:
    (tag,) = (path.parent.name for path in source.glob(f"*/{MODEL_STATES}"))
    shutil.copytree(source / tag, source / "global_step1")
    shutil.copytree(source, source / "sub" / "checkpoint-7", ignore=shutil.ignore_patterns("sub"))
    (source / "sub" / "log").touch()
    done = converted(source, tmp_path / "new")
    assert sorted(done["copied"]) == ["sub/log", SCRIPT]
    assert done["notes"] == [
        f"{name} is left out: it is another checkpoint" for name in ("global_step1", "sub/checkpoint-7")
    ]
    again = converted(source, source / "inside")  # what is being written is no part of what is copied
    assert again["copied"] == done["copied"]
    assert converted(source, tmp_path / "newer")["notes"][1:] == [
        f"{name} is left out: it is another checkpoint" for name in ("inside", "sub/checkpoint-7")
    ]


def test_what_is_no_file_is_left_out(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    done = converted(source, tmp_path / "new")
    assert done["notes"] == ["pipe is left out: it is no regular file"]


def test_the_inner_folder_keeps_its_name(source: Path, tmp_path: Path) -> None:
    """Accelerate's is called pytorch_model."""
    (tag,) = (path.parent for path in source.glob(f"*/{MODEL_STATES}"))
    tag.rename(source / "pytorch_model")
    (source / "latest").write_text("pytorch_model\n")
    converted(source, tmp_path / "new")
    assert (tmp_path / "new" / "latest").read_text() == "pytorch_model"
    assert (tmp_path / "new" / "pytorch_model" / MODEL_STATES).is_file()


@pytest.mark.parametrize("words", ["..", "../ours/global_step2", "global_step2/../global_step2", "/tmp"])
def test_an_inner_folder_elsewhere_is_refused(ours: Path, tmp_path: Path, words: str) -> None:
    (ours / "latest").write_text(words)
    result = convert(ours, tmp_path / "new")
    assert result.exit_code == 2
    assert f"its latest is '{words}'; it must be the name of a folder in it" in result.stderr


def test_an_inner_folder_alone_brings_nothing(ours: Path, tmp_path: Path) -> None:
    (ours / "trainer_state.json").touch()
    done = export_checkpoint(str(ours / "global_step2"), str(tmp_path / "new"), to="zero")
    assert done.copied == (SCRIPT,)


def test_a_file_holds_no_files(zero: Path, tmp_path: Path) -> None:
    assert import_checkpoint(str(zero), str(tmp_path / "new.pt")).copied == ()


def test_what_cannot_be_read_is_found_out_first(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ours / "secret").touch()
    original = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInputError, match=r"secret': cannot be read \(Permission denied\); all of the folder"):
        export_checkpoint(str(ours), str(tmp_path / "new"), to="zero")


def test_a_copy_that_fails_leaves_nothing(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ours / "a").touch()
    (ours / "b").touch()
    original = shutil.copy2

    def full(source: Path, target: Path, **more: Any) -> Any:
        if source.name == "b":
            raise OSError(28, "No space left on device")
        return original(source, target, **more)

    monkeypatch.setattr(shutil, "copy2", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ZftuneError, match=r"cannot be written \(No space left on device\)"):
        export_checkpoint(str(ours), str(tmp_path / "new"), to="zero")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", by_day(["zero"], all_of=["ours", "zero"]))
def test_deepspeeds_script_works_in_every_folder(
    request: pytest.FixtureRequest, plain: Path, tmp_path: Path, form: str
) -> None:
    """Also where the source had none; tied and frozen weights and buffers included."""
    folder: Path = request.getfixturevalue(form)
    zygote.run([folder / SCRIPT, ".", tmp_path / "out"], cwd=folder, check=True)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    expected = torch.load(plain, weights_only=True)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
