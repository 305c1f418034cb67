"""The list of rdma-core's cases: each is there once, what it names exists, and the page was made from it."""

from __future__ import annotations

from collections import Counter

import pytest
from cases import coverage_page as made

DATA = made.load()
CASES = made.cases(DATA)


def test_every_case_is_listed_once():
    assert [case for case, times in Counter(case[:2] for case in CASES).items() if times > 1] == []
    assert len(CASES) == DATA["total"]
    assert not set(DATA["files"]) & set(DATA["provider"])


def test_every_case_has_tests_or_a_reason():
    assert [case for case in CASES if bool(case.tests) == bool(case.reason)] == []
    used = {case.reason for case in CASES if case.reason}
    assert used == set(DATA["reasons"])


def test_every_test_that_is_named_exists():
    named = {test for case in CASES for test in case.tests}
    named |= {test for reason in DATA["reasons"].values() for test in reason["proof"]} | set(DATA["since"])
    assert named - made.our_tests() == set()


def test_a_case_names_a_test_once():
    assert [case for case in CASES if len(set(case.tests)) != len(case.tests)] == []


@pytest.mark.parametrize("reason", sorted(set(DATA["reasons"]) - {"mlx5"}))
def test_what_is_missing_is_shown_by_a_test(reason):
    """But for the interface that only a vendor's own library has: there is nothing to ask."""
    assert DATA["reasons"][reason]["proof"]


def test_the_page_is_current():
    assert made.PAGE.read_text() == made.page(DATA), "run: python tests/cases/coverage_page.py"


def test_cases_of_a_checkout_are_found(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "class A:\n    def test_b(self): ...\n    def helper(self): ...\ndef test_c(): ...\n"
    )
    (tmp_path / "base.py").write_text("class B:\n    def test_b(self): ...\n")
    assert made.their_cases(tmp_path) == {("test_x.py", "A.test_b")}
