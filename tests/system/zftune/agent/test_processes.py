"""Processes that begin, fork and end in every way: who is recorded, and that exit codes and output stay."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.zftune.agent.children import environ, run, script, steps_of, train

LOOP = """
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def go(batches, **options):
        for (ids,) in loader(batches, **options):
            loss_of(model, ids).backward()
            optimizer.step()
            yield
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("raise RuntimeError('no more')", 1, "exit"),
        ("sys.exit(3)", 3, "exit"),
        ("os._exit(4)", 4, None),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM, None),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, None),
    ],
)
def test_endings(tmp_path: Path, ending: str, code: int, last: str | None) -> None:
    child = train(
        tmp_path,
        LOOP
        + f"""
    for number, _ in enumerate(go(20)):
        if number == 9:
            {ending}
""",
        steps=50,
        check=False,
    )
    assert child.returncode == code
    assert ("no more" in child.stderr) == ("raise" in ending)
    assert "zftune" not in child.stderr
    # Without a goodbye the two steps that were not resolved are lost.
    assert len(child.steps) == (9 if last else 7)
    assert [line["reason"] for line in child.lines if line["kind"] == "end"] == ([last] if last else [])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_are_no_training(tmp_path: Path, method: str) -> None:
    child = train(
        tmp_path,
        f"""
        def main():
            model = Small()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for (ids,) in loader(12, num_workers=1, multiprocessing_context="{method}"):
                loss_of(model, ids).backward()
                optimizer.step()

        if __name__ == "__main__":
            main()
        """,
    )
    assert child.only("end")["reason"] == "measured"
    assert all("data" in step["waits_ms"] for step in child.steps)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_training_in_a_process_of_multiprocessing(tmp_path: Path, method: str) -> None:
    """The child is recorded, its goodbye included, and the parent's steps are not taken for the child's."""
    child = train(
        tmp_path,
        f"""
        import torch.multiprocessing

        def steps(count):
            model = Small()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for (ids,) in loader(count):
                loss_of(model, ids).backward()
                optimizer.step()

        if __name__ == "__main__":
            steps(4)
            context = torch.multiprocessing.get_context("{method}")
            process = context.Process(target=steps, args=(8,))
            process.start()
            process.join()
            steps(4)
            print(json.dumps([os.getpid(), process.pid]))
        """,
        steps=50,
    )
    parent, inner = child.stdout.splitlines()[-1].strip("[]").split(", ")
    found = {line["pid"]: lines for lines in child.files for line in lines if line["kind"] == "header"}
    assert set(found) == {int(parent), int(inner)}
    assert [step["index"] for step in steps_of(found[int(inner)])] == list(range(1, 8))
    assert found[int(inner)][-1]["reason"] == "exit"
    assert found[int(parent)][-1]["reason"] == "exit"


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(Small())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (ids,) in loader(12):
            loss = loss_of(model, ids)
            loss.backward()
            if dist.get_rank() == 1:
                time.sleep(0.1)
            dist.all_reduce(loss.detach())
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    folder = tmp_path / "records"
    folder.mkdir()
    torchrun = Path(sys.executable).parent / "torchrun"
    child = run([torchrun, "--standalone", "--nproc-per-node", "2", path], folder, environ(folder), check=False)
    # With gloo a rank aborts now and then at its very end on a busy machine, without the agent as well (1 run in 20).
    assert child.returncode == 0 or "terminate called without an active exception" in child.stderr, child.stderr
    headers = [lines[0] for lines in child.files]
    assert sorted((h["rank"], h["local_rank"], h["world_size"]) for h in headers) == [(0, 0, 2), (1, 1, 2)]
    for header, lines in zip(headers, child.files, strict=True):
        assert lines[-1]["reason"] == "measured"
        model = next(line for line in lines if line["kind"] == "model")
        assert (model["model"], model["systems"]) == ("Small", ["DistributedDataParallel"])
        missing = {line["field"]: line["reason"] for line in lines if line["kind"] == "missing"}
        assert "in part" in missing["waits_ms"]
        if header["rank"] == 0:  # which waits for the other one, unless it is later itself on a busy machine
            assert max(step["waits_ms"]["comm"] for step in steps_of(lines)) >= 50


def test_a_model_that_is_fully_sharded_is_named(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        """
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = fully_shard(Small())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (ids,) in loader(12):
            loss_of(model, ids).backward()
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    assert child.only("model")["systems"] == ["FSDP2"]
    assert child.only("end")["reason"] == "measured"


@pytest.mark.smoke
def test_training_in_a_thread_that_is_not_the_main_one(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        LOOP
        + """
    import threading

    other = Small()

    def disturb():
        stepper = torch.optim.SGD(other.parameters(), lr=1e-3)
        while not over:
            loss_of(other, torch.zeros(1, 5, dtype=torch.long)).backward()
            stepper.step()
            time.sleep(0.002)

    over = False
    def work():
        global over
        steps = go(12)
        next(steps)
        thread = threading.Thread(target=disturb)
        thread.start()
        for _ in steps:
            time.sleep(0.005)
        over = True
        thread.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
""",
    )
    assert child.only("end")["reason"] == "measured"
    for step in child.steps:  # none of the other thread's
        assert [lane for lane, _, _ in step["spans"] if lane != "other"] == ["data", "forward", "backward", "optimizer"]


@pytest.mark.smoke
def test_a_step_that_raised_is_left(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        """
        class Moody(torch.optim.SGD):
            calls = 0

            def step(self, closure=None):
                Moody.calls += 1
                if Moody.calls == 4:
                    raise ValueError("not now")
                return super().step(closure)

        model = Small()
        optimizer = Moody(model.parameters(), lr=1e-3)
        for (ids,) in loader(13):
            loss_of(model, ids).backward()
            try:
                optimizer.step()
            except ValueError:
                pass
        """,
    )
    assert child.only("end")["reason"] == "measured"
    lanes = [tuple(lane for lane, _, _ in step["spans"] if lane != "other") for step in child.steps]
    whole = ("data", "forward", "backward", "optimizer")
    assert lanes == [whole, whole, whole * 2, whole, whole, whole]


ENDED = """
    import atexit, os, signal

    class Stubborn:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(10))  # where the signal's handler is called

    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    atexit.register(lambda: print("atexit"))
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    try:
        {kill}
        for _ in range(1000):
            time.sleep(0.01)
    finally:
        print("finally", end=" ")
"""
KILL = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.smoke
@pytest.mark.parametrize("kill", [KILL, "del (stubborn := [Stubborn()])[0]"], ids=["anywhere", "where it is swallowed"])
def test_what_is_stopped_ends_as_by_an_exit(tmp_path: Path, kill: str) -> None:
    done = train(tmp_path, ENDED.format(kill=kill), check=False, ZFTUNE_AGENT_STOP="1")
    assert (done.returncode, done.stderr) == (143, "")
    assert done.stdout.split() == ["-15", "finally", "atexit"]


@pytest.mark.parametrize(("stop", "ranks"), [("0", "1"), ("1", "2")], ids=["not stopped", "two ranks"])
def test_others_end_by_the_signal(tmp_path: Path, stop: str, ranks: str) -> None:
    done = train(tmp_path, ENDED.format(kill=KILL), check=False, ZFTUNE_AGENT_STOP=stop, WORLD_SIZE=ranks)
    assert done.returncode == -signal.SIGTERM
    assert "finally" not in done.stdout
