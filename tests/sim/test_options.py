"""Sizes, lists and rates as a person types them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from ninfer_pool.core import sizes
from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("8GB", 8_000_000_000),
        ("1.5GiB", 3 << 29),
        ("64 KiB", 65_536),
        ("2kB", 2_000),
        ("1TiB", 1 << 40),
        ("156254208", 156_254_208),
        ("7B", 7),
    ],
)
def test_a_size_is_a_number_with_an_exact_unit(text: str, size: int) -> None:
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["8Gib", "8G", "8XB", "GiB", "", "-1GiB", "0", "0GiB", "0.1", "nan", "inf", "1e9", "8GiB!",
     "8,5GiB", "９GiB", "9999999TiB", "9" * 5000],
)  # fmt: skip
def test_any_other_size_is_refused_with_one_line_that_quotes_it(text: str) -> None:
    with pytest.raises(UsageError, match=r"size such as 8GiB|at most 1024TiB") as error:
        sizes.parse_size(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


def test_lists_keep_their_order_without_repeats() -> None:
    assert options.parse_entries("4,1, 4,2") == (4, 1, 2)
    assert options.parse_sizes("1GiB,1024MiB,2GiB") == (1 << 30, 2 << 30)
    assert options.parse_policies("lru,default,lru") == ("lru", "default")


@pytest.mark.parametrize("text", ["", ",", "1,", "1,,2"])
def test_a_list_with_an_empty_item_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="empty"):
        options.parse_entries(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1_0", "x", "nan", "9" * 10, "9" * 5000, "²"])
def test_k_is_a_whole_number_from_one(text: str) -> None:
    with pytest.raises(UsageError, match="whole number from 1"):
        options.parse_entries(text)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "1e999", "fast", ""])
def test_a_rate_is_positive_and_finite(text: str) -> None:
    with pytest.raises(UsageError, match="positive number of tokens"):
        options.parse_rate(text)
    assert options.parse_rate("1e3") == 1000.0


@pytest.mark.parametrize("text", ["0", "-3", "nan", "25G", "25GB/h", "/s", ""])
def test_a_byte_rate_is_a_size_a_second(text: str) -> None:
    with pytest.raises(UsageError, match="bytes per second, such as 25GB or 25GiB"):
        options.parse_byte_rate(text)
    assert options.parse_byte_rate("25GB") == options.parse_byte_rate("25GB/s") == 25 * 10**9
    assert options.parse_byte_rate("1.5GiB") == 3 << 29


def test_the_least_budget_is_one_page_and_one_image_in_whole_pages() -> None:
    options.check_budgets([400], page_bytes=100, image_bytes=201, model="m")
    with pytest.raises(UsageError, match="m needs at least 400 bytes"):
        options.check_budgets([800, 399], page_bytes=100, image_bytes=201, model="m")
    options.check_budgets([100], page_bytes=100, image_bytes=0, model="plain")


@pytest.mark.parametrize(
    ("size", "text"),
    [(8 << 30, "8 GiB"), (153_954_304, "147 MiB"), (2_297_856, "2.19 MiB"), (999, "999 B"),
     (0, "0 B"), (15 << 29, "7.50 GiB"), (5 << 50, "5120 TiB")],
)  # fmt: skip
def test_bytes_read_in_the_largest_unit_they_fill(size: int, text: str) -> None:
    assert sizes.format_bytes(size) == text


def test_an_output_replaces_its_file_only_when_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    with suppress(RuntimeError), options.replacing(target) as draft:
        draft.write_text("ne")
        raise RuntimeError("half way")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    with options.replacing(target) as draft:
        draft.write_text("new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_a_link_stays_a_link_and_a_device_is_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    with options.replacing(link) as draft:
        draft.write_text("text")
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    with options.replacing(Path("/dev/null")) as draft:
        assert draft == Path("/dev/null")
