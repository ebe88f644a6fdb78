"""Study 014: what figures say, the AdamW behind them, and cells that train, are refused, fail or hang."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import upstream_ops, zygote
from tests.tiers import by_day, everything

STUDY = Path(__file__).parents[2] / "studies" / "014-compatibility"
GOOD = {
    "not_finite_from": None,
    "off": 1e-7,
    "first_off": 0.0,
    "apart": 1e-6,
    "fall": 1.0,
    "skipped": 0,
    "expected_skipped": 0,
    "bitwise": None,
    "held": 0.5,
    "unused_moved": False,
}


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The study's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    try:
        spec = importlib.util.spec_from_file_location("study_compatibility", STUDY / "run.py")
        assert spec is not None
        assert spec.loader is not None
        run = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(run)
        parts = ["cells", "judging", "oracle", "report", "scripts", "training"]
        parts += ["idioms.listing", "idioms.script", "idioms.sides"]
        found = {part: importlib.import_module(f"compatibility.{part}") for part in parts}
        yield SimpleNamespace(run=run, **{part.rpartition(".")[2]: module for part, module in found.items()})
    finally:
        sys.path[:] = before


def cell(study: Any, table: str, row: str, side: str = "zenflow", column: str = "fp32") -> Any:
    (found,) = [
        one for one in study.cells.tables()[table] if (one.row, one.side, one.column) == (row, side, column)
    ]  # fmt: skip
    return found


def test_every_combination_is_there_once(study: Any) -> None:
    tables = study.cells.tables()
    names = [one.name for table in tables.values() for one in table]
    assert len(names) == len(set(names))
    assert len(tables["stages"]) == 2 * 4 * 3 * 3
    for section in ("ZeRO-Offload", "ZenFlow"):
        assert len(tables[section]) == len(study.cells.FEATURES) * 3 * 2
        assert all(one.config["zero_optimization"]["stage"] == 2 for one in tables[section])
    assert len(tables["idioms"]) == len(study.listing.NAMES) * (len(study.cells.SETTINGS) + 1)
    ranks = tables["ranks"]
    assert len(ranks) == 2 * 3 * (2 * (2 * 2 + 4) + 3)
    for one in ranks:
        assert one.ranks * one.config["train_micro_batch_size_per_gpu"] == study.training.ROWS
        assert one.config["gradient_accumulation_steps"] == one.passes
    quick = [one.name for table in study.cells.quick().values() for one in table]
    assert len(quick) == 13
    assert set(quick) <= set(names)


@pytest.mark.parametrize(
    ("figures", "word", "note"),
    [
        ({}, "trains", ""),
        ({"off": 2e-4}, "wrong", "the loss is up to 0.02% off AdamW's"),
        ({"apart": 0.2}, "wrong", "a weight is off by 20% of the way that AdamW moves it"),
        ({"apart": 1.0}, "wrong", "a weight that AdamW moves stays where it was"),
        ({"apart": None}, "wrong", "weights are not finite"),
        ({"not_finite_from": 2, "off": None}, "wrong", "the loss is not finite from step 2 on"),
        ({"skipped": 1}, "wrong", "1 steps are skipped, not 0"),
        ({"bitwise": True}, "trains", "resumed bitwise"),
        ({"bitwise": False}, "trains", "resumed within rounding, not bitwise"),
        ({"unused_moved": True}, "trains", "weight decay reaches the unused parameter; torch's AdamW leaves it alone"),
        ({"error": "BadInputError: stage is 3: use 2"}, "refused", "stage is 3: use 2"),
        ({"error": "IndexError: list"}, "fails", "IndexError: list"),
        ({"ended": "no answer within 60 s"}, "fails", "no answer within 60 s"),
    ],
)
def test_verdicts(study: Any, figures: dict[str, Any], word: str, note: str) -> None:
    of = cell(study, "ZeRO-Offload", "optimizer in the ds_config")
    assert study.judging.verdict(of, {**GOOD, **figures}) == study.judging.Verdict(word, note)


@pytest.mark.parametrize(
    ("tries", "word", "note"),
    [
        (({}, {}, {}), "trains", ""),
        (({}, {"apart": None}, {}), "wrong", "1 of 3 tries: weights are not finite"),
        (({"not_finite_from": 2}, {"apart": None}, {}), "wrong", "2 of 3 tries: the loss is not finite from step 2 on"),
        (({"apart": None}, {}, {"error": "RuntimeError: gone"}), "fails", "1 of 3 tries: RuntimeError: gone"),
        (({"error": "BadInputError: no"},) * 3, "refused", "no"),
        (({"held": 1.0}, {}), "wrong", "1 of 2 tries: a rank has 100% of the weights, not 50%"),
    ],
)
def test_the_worst_try_counts(study: Any, tries: tuple[dict[str, Any], ...], word: str, note: str) -> None:
    of = cell(study, "ranks", "2 ranks, stage 3, a plain loop", "plain")
    found = study.judging.verdict(of, {"tries": [{**GOOD, **one} for one in tries]})
    assert found == study.judging.Verdict(word, note)


@pytest.mark.parametrize(
    ("off", "word", "note"),
    [
        (9e-6, "trains", ""),
        (2e-5, "wrong", "what the script reads is off by 0.002%"),
        (0.31, "wrong", "what the script reads is off by 30%"),
        (None, "wrong", "what the script reads is not finite"),
    ],
)
def test_verdicts_on_idioms(study: Any, off: float | None, word: str, note: str) -> None:
    of = cell(study, "idioms", "SAM", column="windows of 4")
    assert study.judging.verdict(of, {"reads": 3, "off": off, "what": "loss 0"}) == study.judging.Verdict(word, note)


def test_16_bits_have_more_room(study: Any) -> None:
    of = cell(study, "ZeRO-Offload", "optimizer in the ds_config", column="bf16")
    assert study.judging.verdict(of, {**GOOD, "off": 9e-3, "apart": 0.04}).word == "trains"
    assert study.judging.verdict(of, {**GOOD, "off": 2e-2}).word == "wrong"


@pytest.mark.parametrize(("fall", "word"), [(0.31, "trains"), (0.05, "wrong"), (-2.0, "wrong")])
def test_deferred_updates_have_to_lower_the_loss(study: Any, fall: float, word: str) -> None:
    of = cell(study, "settings", "ZenFlow, windows of 4 steps")
    assert study.judging.verdict(of, {**GOOD, "off": 0.3, "apart": 0.5, "fall": fall}).word == word
    scrambled = study.judging.verdict(of, {**GOOD, "first_off": 0.5, "fall": fall})
    assert scrambled == study.judging.Verdict("wrong", "the first loss is 50% off the model's")


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({}, "trains"),
        ({"losses": [4.0, 3.0, 2.2]}, "wrong"),
        ({"losses": [4.0, 3.0, 4.0]}, "wrong"),
        ({"losses": []}, "wrong"),
        ({"status": 2, "said": ["zftune: stage is 3, allowed is 2"]}, "refused"),
        ({"status": 1, "said": ["ValueError: no"]}, "fails"),
        ({"status": None}, "fails"),
    ],
)
def test_verdicts_on_scripts(study: Any, figures: dict[str, Any], word: str) -> None:
    plain = {"status": 0, "losses": [4.0, 3.0, 2.0], "said": []}
    assert study.judging.script_verdict("hf_trainer.py", {**plain, **figures}, plain).word == word


def test_losses_are_found_in_what_scripts_print(study: Any) -> None:
    printed = "step 0: loss 1.2500\n{'loss': '5.2', 'grad_norm': '3'}\n{'loss': 4.5, 'epoch': 1}\nstep 10: loss nan\n"
    assert study.scripts._LOSS.findall(printed) == ["1.2500", "5.2", "4.5", "nan"]


@pytest.mark.parametrize("row", ["gradient clipping", "gradient accumulation", "tied weights", "unused parameter"])
def test_the_oracle_is_torchs_own_training(study: Any, row: str) -> None:
    of, training = cell(study, "ZeRO-Offload", row), study.training
    model = training.make_model(of.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=study.cells.LR, weight_decay=study.cells.DECAY)
    losses = []
    for step in range(of.steps):
        mean = sum(
            training.loss_of(model, of.passes * step + number, slice(0, 4), torch.float32)
            for number in range(of.passes)
        ) / of.passes  # fmt: skip
        (mean * training.spike(of, step)).backward()
        if of.config["gradient_clipping"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), of.config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    expected = study.oracle.expected(of)
    assert expected["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(expected["weights"][name], value, rtol=1e-4, atol=1e-6)


def test_without_clipping_the_clipped_cell_would_be_wrong(study: Any) -> None:
    of = cell(study, "ZeRO-Offload", "gradient clipping")
    seen = study.oracle.expected(replace(of, config={**of.config, "gradient_clipping": 0.0}))
    figures = study.oracle.compared(of, {**seen, "bitwise": None, "held": 1.0})
    assert study.judging.verdict(of, figures).word == "wrong"
    right = study.oracle.compared(of, {**study.oracle.expected(of), "bitwise": None, "held": 1.0})
    assert study.judging.verdict(of, right) == study.judging.Verdict("trains")


def test_cells_that_train_are_refused_fail_and_hang(study: Any, tmp_path: Path) -> None:
    upstream_ops.need()
    table = [
        cell(study, "ZenFlow", "gradient clipping"),
        cell(study, "settings", "stage 3, weights on NVMe"),
        cell(study, "ZenFlow", "Conv2d", "plain"),
        replace(cell(study, "ZeRO-Offload", "two ranks"), limit_s=0.01),
        *by_day([], all_of=[replace(study.cells.quick()["ranks"][0], tries=2)]),
    ]
    said: list[str] = []
    figures = study.run.tried(table, said.append, tmp_path)
    found = [study.judging.verdict(one, figures[one.name]) for one in table]
    assert [one.word for one in found] == ["trains", "refused", "fails", "fails", *by_day([], all_of=["trains"])]
    assert found[1].note.startswith('zero_optimization.offload_param.device is "nvme"; it must be "none" or "cpu"')
    assert found[3].note == "no answer within 0 s"
    assert len(said) == len(table)
    for of_ranks in table[4:]:
        first, second = figures[of_ranks.name]["tries"]
        assert first["held"] == 0.5
        assert {**first, "seconds": 0} == {**second, "seconds": 0}


@pytest.mark.skipif(not everything(), reason="before a release: two more trainings with DeepSpeed")
def test_cells_that_resume_and_that_overflow(study: Any, tmp_path: Path) -> None:
    upstream_ops.need()
    table = [
        cell(study, "ZeRO-Offload", "save and resume", column="bf16"),
        cell(study, "settings", "loss scale that overflows", column="fp16"),
    ]
    figures = study.run.tried(table, lambda text: None, tmp_path)
    resumed, overflown = (figures[one.name] for one in table)
    assert study.judging.verdict(table[0], resumed) == study.judging.Verdict("trains", "resumed bitwise")
    assert study.judging.verdict(table[1], overflown).word == "trains"
    assert overflown["skipped"] == 8


@pytest.mark.parametrize("place", range(7))
def test_idioms_read_what_they_read_with_torch_alone(study: Any, place: int, tmp_path: Path, every_fault: None) -> None:
    upstream_ops.need()
    setting = list(study.cells.SETTINGS)[place]
    rows = [*study.listing.NAMES]
    table = [cell(study, "idioms", row, column=setting) for row in rows]
    undone = cell(study, "idioms", "nGPT, normalised rows", "plain", study.cells.OFFLOADED)
    obeyed = [cell(study, "idioms", "`AveragedModel` (EMA)", "plain", study.cells.OFFLOADED)]
    figures = study.run.tried([*table, *obeyed, undone], lambda text: None, tmp_path)
    words = {one.row: study.judging.verdict(one, figures[one.name]).word for one in table}
    assert words == dict.fromkeys(rows, "trains")
    assert all(study.judging.verdict(one, figures[one.name]).word == "trains" for one in obeyed)
    assert study.judging.verdict(undone, figures[undone.name]).word == "wrong"


@pytest.mark.skipif(not everything(), reason="before a release: a training with DeepSpeed")
def test_an_idiom_is_a_script_for_zftune_run(study: Any, tmp_path: Path) -> None:
    upstream_ops.need()
    of = cell(study, "idioms", "SAM", column=study.cells.OFFLOADED)
    (tmp_path / "ds_config.json").write_text(json.dumps(of.config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **upstream_ops.environment(), **rank, "ZFTUNE_DB": str(tmp_path / "zftune.db")}
    script = [sys.executable, str(STUDY / "idiom.py"), "SAM", str(tmp_path / "ds_config.json")]
    done = zygote.zftune("run", "--", *script, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines() if line.startswith(("loss", "weight")))
    alone = study.sides.Plain(study.sides.oracle(of.config, windowed=False))
    expected = study.script.Script(alone).run(study.listing.idiom("SAM"))
    assert len(printed) == len(dict(expected))
    for what, tensor in dict(expected).items():
        assert float(printed[what]) == pytest.approx(float(tensor.double().norm()), rel=1e-5)


@dataclass
class Unknown:
    """What no worker can read."""

    nonsense: int = 1


def test_a_worker_that_ends_early_is_told(study: Any, tmp_path: Path) -> None:
    with pytest.raises(study.run.WorkerError, match=r"TypeError: .*nonsense"):
        study.run.tried([Unknown()], lambda text: None, tmp_path)


def test_the_readme_has_the_tables_of_the_results(study: Any) -> None:
    records = {
        name: json.loads((STUDY / "results" / f"{name.lower()}.json").read_text(encoding="utf-8"))
        for name in (*study.cells.tables(), "scripts")
    }
    for name, table in study.cells.tables().items():
        assert set(records[name]["figures"]) == {one.name for one in table}
    text = study.report.markdown(study.cells.tables(), records)
    readme = (STUDY / "README.md").read_text(encoding="utf-8")
    assert f"{study.report.BEGIN}\n\n{text}\n{study.report.END}" in readme
    counts = study.report.counts(study.report.found_of(study.cells.tables(), records), "zenflow")
    assert counts["wrong"] + counts["fails"] == 0


def test_tables_replace_tables(study: Any, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{study.report.BEGIN}\nold\n{study.report.END}\nafter\n")
    for text in ("new\n", "newer\n"):
        study.report.into(readme, text)
    assert readme.read_text() == f"before\n{study.report.BEGIN}\n\nnewer\n\n{study.report.END}\nafter\n"
