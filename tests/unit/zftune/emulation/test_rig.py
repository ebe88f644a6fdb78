"""Rig files: the rates that a timeline turns into, and a sentence for every bad file."""

from __future__ import annotations

from pathlib import Path

import pytest

from zenflow import ConfigError
from zftune.emulation import RigSpec
from zftune.emulation.machines import load_rig, rig_names

RATES = """name = "r"
[rates]
link_d2h_gbps = 1.5
link_h2d_gbps = 2
host_gbps = 3
device_gbps = 400
forward_ms = 5
backward_ms = 6
"""
TIMELINE = """name = "t"
source = "a table"
[timeline]
forward_ms = 45
backward_ms = 2000
d2h_ms = 500
host_ms = 4600
h2d_ms = 250
scale = 0.1
"""


def spec(text: str, folder: Path) -> RigSpec:
    path = folder / "rig.toml"
    path.write_text(text)
    return RigSpec.load(path)


def test_rates_are_taken_as_they_are(tmp_path: Path) -> None:
    rig = spec(RATES, tmp_path).for_elements(12345)
    assert (rig.name, rig.source, rig.scale) == ("r", "", 1.0)
    assert (rig.link_d2h_gbps, rig.link_h2d_gbps, rig.host_gbps, rig.device_gbps) == (1.5, 2.0, 3.0, 400.0)
    assert (rig.forward_ms, rig.backward_ms) == (5.0, 6.0)


@pytest.mark.parametrize("elements", [1, 10**6, 7 * 10**9])
def test_a_timeline_gives_this_workload_the_same_ratios(elements: int, tmp_path: Path) -> None:
    rig = spec(TIMELINE, tmp_path).for_elements(elements)
    assert (rig.name, rig.source, rig.scale, rig.device_gbps) == ("t", "a table", 0.1, None)
    assert [rig.forward_ms, rig.backward_ms] == pytest.approx([4.5, 200.0])
    # What the rates make of this many elements, in ms: 2 bytes each over the link, 28 on the host.
    assert 2 * elements / (rig.link_d2h_gbps * 1e6) == pytest.approx(50)
    assert 2 * elements / (rig.link_h2d_gbps * 1e6) == pytest.approx(25)
    assert 28 * elements / (rig.host_gbps * 1e6) == pytest.approx(460)


def test_device_ms_is_optional(tmp_path: Path) -> None:
    rig = spec(TIMELINE + "device_ms = 30\n", tmp_path).for_elements(1000)
    assert rig.device_gbps is not None
    assert 28 * 1000 / (rig.device_gbps * 1e6) == pytest.approx(3)


def test_effects_are_optional(tmp_path: Path) -> None:
    assert spec(RATES, tmp_path).effects == {}
    rig = spec(RATES + "[effects]\nslow_core = 0.5\nlink_noise = 1\n", tmp_path).for_elements(10)
    assert (rig.slow_core, rig.link_contention, rig.link_noise) == (0.5, 0.0, 1.0)
    slower = spec(TIMELINE + "[effects]\nlink_contention = 0.25\n", tmp_path).for_elements(10)
    assert (slower.slow_core, slower.link_contention, slower.link_noise) == (1.0, 0.25, 0.0)


def test_a_thread_is_optional_and_scaled_with_a_timeline(tmp_path: Path) -> None:
    free = spec(RATES, tmp_path).for_elements(10)
    assert (free.thread_weight_us, free.thread_bucket_us, free.thread_job_us, free.thread_launch_us) == (0, 0, 0, 0)
    table = "[thread]\nweight_us = 5\nbucket_us = 90\njob_us = 60.5\n"
    rig = spec(RATES + table, tmp_path).for_elements(10)
    assert (rig.thread_weight_us, rig.thread_bucket_us, rig.thread_job_us, rig.thread_launch_us) == (5, 90, 60.5, 0)
    tenth = spec(TIMELINE + table, tmp_path).for_elements(10)
    assert (tenth.thread_weight_us, tenth.thread_bucket_us) == pytest.approx((0.5, 9.0))


@pytest.mark.parametrize("name", rig_names())
def test_rigs_that_come_with_the_package_have_a_source_and_a_thread(name: str) -> None:
    assert (load_rig(name).name, load_rig(name).source != "") == (name, True)
    rig = load_rig(name).for_elements(1000)
    assert rig.host_gbps > 0
    assert 0 < rig.thread_weight_us < rig.thread_job_us < rig.thread_bucket_us < 1000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name = ", "it is not TOML"),
        ("", "has 0 of the tables [rates] and [timeline]; it must have one"),
        ("rates = 3\nname = 'x'", "has 0 of the tables [rates] and [timeline]; it must have one"),
        (RATES + TIMELINE.partition("\n")[2].partition("\n")[2], "has 2 of the tables"),
        (
            RATES.replace('name = "r"', ""),
            "has no name; it may have name, source, one table, [effects], [thread]",
        ),
        (RATES.replace('"r"', "3"), "has no name"),
        ("nome = 'x'\n" + RATES, "has the unknown key 'nome'"),
        (RATES.replace("host_gbps = 3\n", ""), "has no rates.host_gbps; needed are link_d2h_gbps"),
        (TIMELINE.replace("scale = 0.1\n", ""), "has no timeline.scale; needed are forward_ms"),
        (RATES + "scale = 1\n", "has rates.scale = 1; it must be a number > 0, as must link_d2h_gbps"),
        (RATES.replace("= 400", "= 0"), "has rates.device_gbps = 0; it must be a number > 0"),
        (RATES.replace("= 400", "= -1.5"), "has rates.device_gbps = -1.5"),
        (RATES.replace("= 400", "= nan"), "has rates.device_gbps = nan"),
        (RATES.replace("= 400", "= inf"), "has rates.device_gbps = inf"),
        (RATES.replace("= 400", "= true"), "has rates.device_gbps = True"),
        (RATES.replace("= 400", "= '400'"), "has rates.device_gbps = '400'"),
        (RATES.replace("= 400", f"= 1{'0' * 400}"), "has rates.device_gbps = 1000"),
        (TIMELINE.replace("= 0.1", "= 0"), "has timeline.scale = 0"),
        ("effects = 3\n" + RATES, "has effects = 3; it must be a table"),
        (RATES + "[effects]\nslow = 1", "has effects.slow; effects are slow_core, link_contention, link_noise"),
        (RATES + "[effects]\nslow_core = 1.5", "has effects.slow_core = 1.5; it must be above 0 and at most 1"),
        ("thread = 3\n" + RATES, "has thread = 3; it must be a table"),
        (RATES + "[thread]\nstep_us = 1", "has thread.step_us; it may have weight_us, bucket_us, job_us, launch_us"),
        (RATES + "[thread]\njob_us = -1", "has thread.job_us = -1; it must be a number >= 0"),
        (RATES + "[effects]\nlink_noise = 'much'", "has effects.link_noise = 'much'; it must be above 0 and at most 2"),
    ],
)
def test_a_bad_file_is_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(text, tmp_path)
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory"):
        RigSpec.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        RigSpec.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="it is not TOML"):
        RigSpec.load(tmp_path / "binary.toml")
