"""The page lists exactly the rows that are run, and nothing is left out without a reason."""

from __future__ import annotations

import pytest

from . import page
from .rows import DEVICES, HOLES, OURS, ROWS


def test_the_page_lists_these_rows() -> None:
    shown = [text for text in page.PAGE.read_text().splitlines() if text.startswith("| `")]
    expected = [f"{page.line(row)} yes |" for row in ROWS] + [page.hole_line(hole) for hole in HOLES]
    assert shown == expected, f"run: {page.RUN}"


def test_names_are_unique() -> None:
    names = [str(case) for case in [*ROWS, *HOLES]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("peer", sorted({row.peer for row in ROWS}))
def test_every_device_and_part_has_a_row_or_a_reason(peer: str) -> None:
    holes = {hole.where for hole in HOLES if hole.peer == peer}
    parts = {"rdma_server": ("client",), "rdma_client": ("server",)}.get(peer, OURS)
    for device in DEVICES:
        for ours in parts:
            there = any((row.peer, row.device, row.ours) == (peer, device, ours) for row in ROWS)
            assert there != (f"over {device}" in holes), f"{peer} over {device}, we are the {ours}"


def test_a_part_of_a_run_makes_no_page() -> None:
    outcomes = {str(case): True for case in [*ROWS, *HOLES]}
    del outcomes[str(ROWS[3])]
    with pytest.raises(ValueError, match=f"not run: {ROWS[3]}$"):
        page.page(outcomes)


def test_a_failure_shows_on_the_page() -> None:
    outcomes = {str(case): True for case in [*ROWS, *HOLES]} | {str(ROWS[0]): False}
    assert f"{page.line(ROWS[0])} **no** |" in page.page(outcomes)
