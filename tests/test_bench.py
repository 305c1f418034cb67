"""The benchmarks run: the null provider builds, the layer's cases work on it, and the page is made from results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import layer  # noqa: E402
from bench.build import BUILD, build  # noqa: E402
from bench.goals import ROWS  # noqa: E402
from bench.report import COLUMNS, cells, page  # noqa: E402
from bench.rounds import Figure, measure  # noqa: E402

MEASURED = (
    "c write",
    "fused",
    "write",
    "write_many 64",
    "prepared write_many 64",
    "two-sided",
    "two-sided send",
    "start_write",
    "qps 1",
    "qps 8",
    "qps 64",
)


@pytest.fixture(scope="module")
def null() -> str:
    return str(build() / "libnull.so")


def test_everything_is_built_without_a_warning(tmp_path):
    assert {path.name for path in build(tmp_path).rglob("*.so*")} == {"libnull.so", "libibverbs.so.1", "libfloor.so"}


def test_the_layer_is_timed_on_the_null_provider(null):
    with layer.Worker("bench.ours", LD_PRELOAD=null) as worker:
        assert set(MEASURED) <= set(worker.names)
        cases = worker.cases("pvl")
        figures = measure({name: cases[f"pvl: {name}"] for name in MEASURED}, rounds=2, seconds=0.0005)
    for name, figure in figures.items():
        assert 1 < figure.minimum <= figure.median < 1e7, name
        assert len(figure.values) == 2
    assert figures["c write"].median < figures["fused"].median < figures["write"].median


def test_a_connection_takes_little_python_memory(null):
    with layer.Worker("bench.process", LD_PRELOAD=null) as worker:
        assert 4096 < worker.run("memory", 20) < 20 * 1024  # the goal is 16; this is against growth unseen


def test_a_connection_takes_few_python_calls(null):
    with layer.Worker("bench.process", LD_PRELOAD=null) as worker:
        assert 200 < worker.run("calls of a life", 1) < 1800


@pytest.mark.parametrize("module", ["ibverbs", "pyverbs"])
def test_a_peer_is_timed_on_the_null_provider(null, module):
    if module in layer.peers():
        return  # the table then has no column of it
    with layer.ExitStack() as stack:
        cases = layer.peer_workers(stack)[module].cases(module)
        for name, case in cases.items():
            assert case(64) > 0, name


def test_turns_are_taken_case_by_case():
    order: list[str] = []

    def case(name: str, cost: float):
        def run(count: int) -> float:
            order.append(name)
            return cost * count

        return run

    figures = measure({"a": case("a", 5.0), "b": case("b", 7.0)}, rounds=3, seconds=0)
    assert order == ["a", "b"] * 3
    assert figures == {"a": Figure.of([5.0] * 3), "b": Figure.of([7.0] * 3)}


def test_a_row_is_held_against_its_goal():
    by_name = {row.own: row for row in ROWS}
    samples = {
        "pvl: fused": [150.0, 160.0, 190.0],
        "pvl: c write": [12.0, 13.0, 14.0],
        "read 65536 window: pvl": [110.0, 99.0, 211.0],
        "read 65536 window: c": [105.0, 101.0, 202.0],
    }
    figures = {name: Figure.of(values).record() for name, values in samples.items()}
    fused, read = by_name["pvl: fused"], next(row for row in ROWS if row.floor == "read 65536 window: c")
    assert fused.met(figures) is True
    assert fused.value(figures, "minimum") == 138.0
    assert read.met(figures) is False  # slower than C by its median
    assert by_name["life: pvl"].met(figures) is None
    assert all(len(cells(row, figures)) == len(COLUMNS) for row in ROWS)


def test_noise_to_both_sides_is_no_distance():
    row = next(row for row in ROWS if row.how == "apart")
    samples = {row.own: [104.0, 95.0, 101.0, 99.0, 100.0], row.floor: [100.0] * 5}
    figures = {name: Figure.of(values).record() for name, values in samples.items()}
    assert row.value(figures, "median") == 0
    assert row.value(figures, "minimum") == pytest.approx(5)


def test_the_page_is_what_the_results_say():
    shown = ROOT / "docs" / "performance.md"
    results = json.loads((ROOT / "bench" / "results.json").read_text())
    pictures = sorted(f"performance/{path.name}" for path in shown.with_suffix("").glob("*.svg"))
    assert sorted(line[2:].partition("]")[0] for line in shown.read_text().splitlines() if line[:2] == "![") == pictures
    order = [line[2:].partition("]")[0] for line in shown.read_text().splitlines() if line[:2] == "!["]
    assert shown.read_text() == page(results, order)


def test_nothing_is_installed():
    assert BUILD.is_relative_to(ROOT / "build")
