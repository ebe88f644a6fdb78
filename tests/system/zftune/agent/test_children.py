"""The agent in real training scripts that know nothing of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import zftune
from tests.support.tiers import fast
from tests.support.zftune.agent.children import Line, environ, run, train

PLAIN = """
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    around = []
    for (ids,) in loader(12):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = time.monotonic_ns()
        optimizer.step()
        around.append([before, time.monotonic_ns()])
    print(json.dumps({"around": around, "checksum": checksum(model)}))
"""


NS_IN_MS = 1e-5
"""Room for rounding: records have milliseconds with six decimals."""


def adds_up(step: Line) -> bool:
    """Phases fill the step, spans fill it without a gap, and tell the same."""
    spans = step["spans"]
    starts = [0.0, *(end for _, _, end in spans)]
    tiled = all(begin == before for (_, begin, _), before in zip(spans, starts, strict=False))
    lanes = {lane: sum(e - b for name, b, e in spans if name == lane) for lane in step["phases_ms"]}
    return (
        tiled
        and sum(step["phases_ms"].values()) == pytest.approx(step["step_ms"], abs=1e-4)
        and lanes == pytest.approx(step["phases_ms"], abs=1e-4)
    )


@pytest.mark.smoke
def test_a_plain_script_is_recorded(tmp_path: Path) -> None:
    child = train(tmp_path, PLAIN, warmup=2, steps=5)
    header, model = child.only("header"), child.only("model")
    assert header["protocol"] == 1
    assert (header["rank"], header["world_size"], header["script"]) == (0, 1, "train.py")
    assert (header["device"], header["has_stream"], header["source"]) == ("cpu", False, "wall clock")
    assert (header["zftune"], header["torch"]) == (zftune.__version__, torch.__version__)
    assert (model["model"], model["optimizer"], model["dtype"]) == ("Small", "AdamW", "float32")
    assert model["learning_rates"] == [1e-3]
    tied, inner, bias = 50 * 64, 64 * 64 + 64, 50
    assert model["parameters"] == model["trainable"] == tied + inner + bias
    assert model["model_bytes"] == 4 * model["trainable"]
    assert (model["micro_batch"], model["sequence"], model["tokens_per_step"]) == (4, 17, 68)
    assert [step["index"] for step in child.steps] == [1, 2, 3, 4, 5, 6]  # gone before the others are resolved
    assert [step["index"] for step in child.steps if step["measured"]] == [2, 3, 4, 5, 6]
    assert all(adds_up(step) for step in child.steps)
    assert all(step["overhead_ms"] > 0 for step in child.steps)
    assert all(step["stall_ms"] is None and set(step["waits_ms"]) == {"data"} for step in child.steps)
    assert "plain CPU" in child.missing["stall"]
    assert child.only("end")["reason"] == "measured"


def test_steps_are_those_of_the_scripts_own_stopwatch(tmp_path: Path) -> None:
    long = PLAIN.replace("optimizer.zero_grad()", "time.sleep(0.05); optimizer.zero_grad()")  # beside the optimizer
    child = train(tmp_path, long)
    around = child.said["around"]
    assert len(child.steps) == 6
    for first, last in [*((step, step) for step in child.steps), (child.steps[0], child.steps[-1])]:
        # From within one call of the optimizer to within another one, however long they take.
        (begins, begun), (ends, ended) = around[first["index"] - 1], around[last["index"]]
        took_ms = sum(step["step_ms"] for step in child.steps if first["index"] <= step["index"] <= last["index"])
        assert (ends - begun) / 1e6 <= took_ms + NS_IN_MS
        assert took_ms <= (ended - begins) / 1e6 + NS_IN_MS


@pytest.mark.smoke
def test_the_training_is_what_it_is_without_us(tmp_path: Path) -> None:
    recorded = train(tmp_path, PLAIN)
    folder = tmp_path / "untouched"
    folder.mkdir()
    alone = run([sys.executable, tmp_path / "train.py"], folder, environ(folder, ZFTUNE_DISABLE="1"))
    assert alone.files == []
    assert alone.said["checksum"] == recorded.said["checksum"]


BURNING = """
    def burn(count):
        total = 0
        for number in range(count): total += number  # the line
        return total

    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (ids,) in loader(8):
        optimizer.zero_grad()
        burn(3_000_000)
        loss_of(model, ids).backward()
        optimizer.step()
"""


@pytest.mark.smoke
def test_the_line_that_holds_the_thread_is_named(tmp_path: Path) -> None:
    lines = train(tmp_path, BURNING).only("lines")
    assert lines["of"] == "step"
    first, text = lines["lines"][0], (tmp_path / "train.py").read_text().splitlines()
    assert (first["file"], first["function"]) == ("train.py", "burn")
    assert text[first["line"] - 1].endswith("# the line")
    assert first["share"] > 0.5
    assert first["within"] == {name: first[name] for name in ("file", "line", "function")}


SLEEPY = """
        class Slow(TensorDataset):
            def __getitem__(self, index):
                time.sleep(0.010)
                return super().__getitem__(index)

        class Sleepy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                time.sleep(0.020)
                return x

            @staticmethod
            def backward(ctx, grad):
                time.sleep(0.030)
                return grad

        class Rest(torch.optim.SGD):
            def step(self, closure=None):
                time.sleep(0.040)
                return super().step(closure)

        model = Small()
        optimizer = Rest(model.parameters(), lr=1e-3)
        for (ids,) in DataLoader(Slow(torch.randint(0, 50, (10, 9)))):
            Sleepy.apply(loss_of(model, ids)).backward()
            optimizer.step()
            time.sleep(0.050)
"""


@pytest.mark.smoke
def test_phases_are_where_they_belong(tmp_path: Path) -> None:
    """Each phase sleeps for its own time: one that had another's would leave that one with less than it slept."""
    child = train(tmp_path, SLEEPY)
    slept = {"data": 10, "forward": 20, "backward": 30, "optimizer": 40, "other": 50}
    for step in child.steps:
        assert adds_up(step)
        for lane, milliseconds in slept.items():
            assert step["phases_ms"][lane] >= milliseconds, lane


@pytest.mark.smoke
@pytest.mark.parametrize("warmup", fast([0], all_of=[0, 1, 2]))
def test_accumulation_is_one_step(tmp_path: Path, warmup: int) -> None:
    child = train(
        tmp_path,
        """
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number, (ids,) in enumerate(loader(40), start=1):
            loss_of(model, ids).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        warmup=warmup,
    )
    assert [step["tokens"] for step in child.steps if step["measured"]] == [4 * 4 * 17] * 5
    lanes = [lane for lane, _, _ in child.steps[0]["spans"] if lane != "other"]
    assert lanes == [*(["data", "forward", "backward"] * 4), "optimizer"]
    assert child.only("model")["tokens_per_step"] == 4 * 4 * 17


@pytest.mark.smoke
def test_a_second_training_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """The first one's optimizer stays alive, as it does in most scripts."""
    child = train(
        tmp_path,
        """
        def stage(width, batches, micro_batch):
            model = nn.Sequential(nn.Embedding(50, width), nn.Linear(width, 50))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for (ids,) in loader(batches, micro_batch):
                loss_of(model, ids).backward()
                optimizer.step()
            return optimizer

        kept = stage(8, 10, 2), stage(16, 60, 3)
        """,
        steps=20,
    )
    (at,) = [at for at, line in enumerate(child.lines) if line["kind"] == "restart"]
    models = [line for line in child.lines if line["kind"] == "model"]
    assert [model["parameters"] for model in models] == [50 * 8 + 8 * 50 + 50, 50 * 16 + 16 * 50 + 50]
    assert [model["micro_batch"] for model in models] == [2, 3]
    after = [line for line in child.lines[at:] if line["kind"] == "step"]
    assert [step["index"] for step in after if step["measured"]] == list(range(2, 22))
    assert {step["tokens"] for step in after} == {3 * 17}
    assert child.only("end")["reason"] == "measured"


def test_a_step_that_grad_scaler_skips_is_a_step(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        """
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        taken = 0
        optimizer.register_step_post_hook(lambda *_: globals().__setitem__("taken", taken + 1))
        for number, (ids,) in enumerate(loader(12)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, ids)).backward()
            if number in (0, 4):
                model.inner.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        print(json.dumps({"taken": taken}))
        """,
    )
    assert child.said["taken"] == 10
    assert [step["index"] for step in child.steps] == [1, 2, 3, 4, 5, 6]
    lanes = {tuple(lane for lane, _, _ in step["spans"] if lane != "other") for step in child.steps}
    assert lanes == {("data", "forward", "backward", "optimizer")}


@pytest.mark.smoke
def test_optimizers_inside_backward_are_named_as_the_reason(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        """
        model = Small()
        optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for (ids,) in loader(5):
            loss_of(model, ids).backward()
        """,
    )
    assert child.steps == []
    assert "fused into backward" in child.missing["step_ms"]


@pytest.mark.smoke
def test_hooks_and_wrappers_are_gone_afterwards(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        """
        import torch.distributed as dist
        from torch.optim import optimizer as module
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        def places():
            return [
                torch.autograd.backward, _BaseDataLoaderIter.__next__, torch.amp.GradScaler.step, dist.all_reduce,
                dist.distributed_c10d.all_reduce, dist.Work.wait,
            ]

        def ours():
            return sum("zftune" in place.__code__.co_filename for place in places() if hasattr(place, "__code__"))

        def hooks():
            return len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks)

        before, hooked = ours(), hooks()
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (ids,) in loader(12):
            loss_of(model, ids).backward()
            optimizer.step()
        finders = [type(finder).__name__ for finder in sys.meta_path]
        print(json.dumps({"before": before, "after": ours(), "hooks": [hooked, hooks()], "finders": finders}))
        """,
    )
    assert child.only("end")["reason"] == "measured"
    assert (child.said["before"], child.said["after"]) == (6, 0)
    assert child.said["hooks"] == [2, 0]
    assert "Watcher" not in child.said["finders"]
