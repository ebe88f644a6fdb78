from __future__ import annotations

import pytest

from zftune import text as units
from zftune.errors import BadInputError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (716.4, "716"),
        (37.12, "37.1"),
        (2.5, "2.5"),
        (0.0527, "0.0527"),
        (-0.21, "-0.21"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert units.number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1, "100%"), (0.995, "99.5%"), (0.99999, "99.9%"), (0.0001, "< 0.1%"), (0.012, "1.2%"), (0.712, "71%")],
)
def test_percent(share: float, text: str) -> None:
    assert units.percent(share) == text


@pytest.mark.parametrize(("ratio", "text"), [(1.0, "1×"), (0.8, "0.80×"), (3.42, "3.4×"), (12.3, "12×")])
def test_times(ratio: float, text: str) -> None:
    assert units.times(ratio) == text


@pytest.mark.parametrize(("count", "text"), [(12, "12 bytes"), (413_500, "414 kB"), (8e10, "80 GB"), (2e12, "2 TB")])
def test_size(count: float, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (869_504, "0.87 million"), (7e9, "7 billion")])
def test_amount(count: float, text: str) -> None:
    assert units.amount(count) == text


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("64", 64e9),
        ("64GB", 64e9),
        ("64 GiB", 64 * 2**30),
        ("0.5tb", 5e11),
        (".5 MiB", 2**19),
        ("512 bytes", 512),
        ("1e3", 1e12),
    ],
)
def test_a_size_may_have_its_own_unit(given: str, count: float) -> None:
    assert units.byte_count("--host-memory", given, unit="GB") == count


@pytest.mark.parametrize("given", ["", "GB", "-1", "0", "nan", "inf", "64 G", "64 parsecs", "1e99", "1,5GB"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(BadInputError) as refused:
        units.byte_count("--host-memory", given, unit="GB")
    allowed = "a number of GB above 0, or one with its unit, such as 64GB or 64GiB"
    assert str(refused.value) == f"--host-memory is {given!r}; it must be {allowed}"
