"""Judgement alone: planted numbers, bottlenecks found by name, gains as computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from stoker.verdict import (
    STAGES,
    Ceilings,
    Figure,
    Loop,
    OpCost,
    Settings,
    Smaller,
    Storage,
    Verdict,
    judge,
    judge_loop,
    judge_settings,
)
from stoker.vitals import Vitals


def at(rate: float) -> Figure:
    return Figure(rate, 0.9 * rate, 1.1 * rate)


def ceilings(**changes: Any) -> Ceilings:
    """A loader that decodes 1,000 images/s with all its 4 threads, and reads far more."""
    plain = Ceilings(
        threads=4,
        cores=4,
        batch_size=100,
        sample_bytes=1e5,
        made={3: at(800), 4: at(1000)},
        loader=at(1000),
        decode_share=0.75,
    )
    return replace(plain, **changes)


def gain(verdict: Verdict, name: str) -> float:
    (found,) = [action.gain for action in verdict.actions if action.name == name]
    return found


def test_slow_storage() -> None:
    """250 cold, 1000 made: 200 together; in sequence 1000, so 500: 2.5 times."""
    storage = Storage("hdd", 0.016, at(1e9), at(250), at(1000))
    judged = judge(ceilings(storage=storage))
    assert judged.stage == "storage"
    assert judged.images_per_second == pytest.approx(200)
    assert judged.headroom == pytest.approx(4)
    assert judged.actions[0].name == "cache"
    assert gain(judged, "pack") == pytest.approx(2.5)
    assert gain(judged, "cache") == pytest.approx(5, rel=1e-3)
    assert "250" in judged.sentence and "25 MB/s" in judged.sentence and "hdd" in judged.sentence
    assert "pack to tar" in next(a.what for a in judged.actions if a.name == "pack")


def test_the_next_ceiling_caps_a_gain() -> None:
    """The consumer takes 300: from 200 that is 1.5 times, whatever is done about storage."""
    storage = Storage("hdd", 0.016, at(1e9), at(250), at(1000))
    judged = judge(ceilings(storage=storage, consumer=at(300)))
    assert judged.stage == "storage"
    assert [action.gain for action in judged.actions] == [pytest.approx(1.5)] * 2
    assert "waits 33% of the time" in judged.sentence
    assert judged.headroom == pytest.approx(300 / 250)


def test_what_measuring_reads_costs_is_no_cost_of_storage() -> None:
    """Reads at 2000, of which memory alone would give 4000: storage itself gives 4000."""
    storage = Storage("ssd", 1e-4, at(4000), at(2000), at(2000), memory=at(4000))
    judged = judge(ceilings(storage=storage))
    assert judged.stage == "decode"
    assert judged.images_per_second == pytest.approx(1 / (1 / 4000 + 1 / 1000))


def test_samples_that_stay_cached_are_judged_by_warm_reads() -> None:
    storage = Storage("hdd", 0.016, at(1e6), at(10), at(20), stays_cached=True)
    judged = judge(ceilings(storage=storage))
    assert judged.stage == "decode"
    assert not {"pack", "cache"} & {action.name for action in judged.actions}
    assert any("first epoch" in note and "hdd" in note for note in judged.notes)


def test_shards_are_not_packed_again() -> None:
    storage = Storage("ssd", 0.001, at(1e9), at(250), at(1000), packed=True)
    judged = judge(ceilings(storage=storage))
    assert gain(judged, "sequential") == pytest.approx(2.5)
    assert "pack" not in {action.name for action in judged.actions}


def test_remote_shards_are_read_beside_the_threads() -> None:
    """They are read ahead: the slower of 600 read and 1,000 made is what comes out."""
    judged = judge(ceilings(storage=Storage("network", 0.05, at(600), packed=True, ahead=True)))
    assert judged.stage == "storage"
    assert judged.images_per_second == pytest.approx(600)


def test_decode() -> None:
    judged = judge(ceilings(smaller=Smaller(256, at(2200), 0.3), consumer=at(5000)))
    assert judged.stage == "decode"
    (action,) = judged.actions
    assert (action.name, action.changes_pixels) == ("smaller", True)
    assert action.gain == pytest.approx(2.2)
    assert "changes pixels" in action.what
    assert judged.headroom == pytest.approx(4000 / (1000 / 0.75))


def test_transform() -> None:
    judged = judge(ceilings(decode_share=0.2))
    assert judged.stage == "transform"
    assert ceilings(decode_share=0.2).transform == pytest.approx(1250)
    assert "1,250" in judged.sentence


def test_slow_python_op() -> None:
    """30 ms of 40 in each of 4 workers, which make 100.

    Written with stock ops 1000. Put last: 1/1000 + 0.030/4 seconds a sample, 117.6.
    """
    ops = (
        OpCost("decode all", 0.002),
        OpCost("RandomCrop", 0.008),
        OpCost("Slow", 0.030, python=True),
    )
    planted = ceilings(made={4: at(100)}, decode_share=0.05, ops=ops, stock=at(1000))
    judged = judge(planted)
    assert planted.python_share == pytest.approx(0.75)
    assert judged.stage == "python"
    assert "Slow takes 30.00 ms" in judged.sentence
    assert [action.name for action in judged.actions] == ["stock", "last"]
    assert gain(judged, "stock") == pytest.approx(10)
    assert gain(judged, "last") == pytest.approx(1 / (0.001 + 0.0075) / 100)


def test_own_code_that_waits() -> None:
    """Workers that sleep 80 % of their time use a fifth of a core each."""
    ops = (OpCost("Own.__getitem__", 0.01, python=True),)
    made = {4: at(400), 3: at(300)}
    planted = ceilings(made=made, decode_share=0.0, ops=ops, waiting=0.8)
    judged = judge(planted)
    assert judged.stage == "storage"
    assert gain(judged, "threads") == pytest.approx(math.ceil(4 / 0.21) / 4)
    assert judge(replace(planted, waiting=0.1)).stage == "python"


def test_slow_consumer() -> None:
    judged = judge(ceilings(consumer=at(400), smaller=Smaller(256, at(2200), 0.3)))
    assert judged.stage == "consumer"
    assert judged.actions == ()
    assert judged.headroom == pytest.approx(2.5)
    assert "nothing to gain here" in judged.sentence


def test_too_few_threads() -> None:
    planted = ceilings(threads=1, cores=8, made={1: at(250), 6: at(1500), 8: at(1520)})
    judged = judge(planted)
    assert judged.stage == "threads"
    assert gain(judged, "threads") == pytest.approx(6)  # the smallest within 3 % of the best
    assert "num_workers=6" in judged.actions[0].what
    assert judge(replace(planted, consumer=at(500))).actions[0].gain == pytest.approx(2)


def test_too_many_threads() -> None:
    judged = judge(ceilings(threads=16, made={3: at(900), 4: at(1000), 16: at(800)}))
    assert judged.stage == "decode"
    assert gain(judged, "threads") == pytest.approx(1.25)
    assert "fewer threads: num_workers=4" in judged.actions[0].what


def test_cpu_quota() -> None:
    """Six cores of which 1.5 may be used, and are: with all of them four times as much."""
    busy = Vitals(1.0, cores=(0.25,) * 6, throttled=0.7, throttled_seconds=2.0)
    planted = ceilings(cores=1.5, threads=6, made={6: at(300), 1: at(310)})
    judged = judge(planted, busy)
    assert judged.stage == "quota"
    assert "70%" in judged.sentence
    assert gain(judged, "quota") == pytest.approx(4)
    assert gain(judged, "threads") == pytest.approx(31 / 30)
    shared = replace(busy, cores=(0.75,) * 6)  # others use 3 more
    assert gain(judge(planted, shared), "quota") == pytest.approx(2)
    assert judge(planted, replace(busy, throttled=0.01)).stage == "decode"


def test_torchs_loader() -> None:
    """It gives 200 where ours gives 1,000; what more can be done comes on top of that."""
    judged = judge(ceilings(theirs=at(200), smaller=Smaller(256, at(2000), 0.3)))
    assert [(a.name, a.after) for a in judged.actions] == [("stoker", ""), ("smaller", "stoker")]
    assert [a.gain for a in judged.actions] == [pytest.approx(5), pytest.approx(2)]


def test_actions_that_keep_pixels_come_first() -> None:
    planted = ceilings(
        threads=1,
        made={1: at(200), 4: at(800)},
        smaller=Smaller(256, at(900), 0.3),
        consumer=at(400),
    )
    assert [action.name for action in judge(planted).actions] == ["threads", "smaller"]


def loop(wait: float, step: float, epochs: int = 1, first: float = 0.0) -> Loop:
    return Loop("loader", 100, 6400, epochs, wait, first, step)


@pytest.mark.parametrize(
    ("times", "vitals", "stage"),
    [
        (loop(0.1, 9.9), None, "consumer"),
        (loop(5, 5), Vitals(10, (0.5,), gpu_busy=0.97), "consumer"),
        (loop(5, 5), Vitals(10, (0.99, 0.98)), "decode"),
        (loop(5, 5), Vitals(10, (0.2, 0.2)), "threads"),
        (loop(5, 5), Vitals(10, (0.9,), throttled=0.5, throttled_seconds=3), "quota"),
        (
            loop(5, 5),
            Vitals(10, (0.2,), disk_busy={"sda": 0.99}, disk_bytes_per_second={"sda": 1e8}),
            "storage",
        ),
    ],
)
def test_loops_are_judged_by_what_was_busy(times: Loop, vitals: Vitals | None, stage: str) -> None:
    judged = judge_loop(times, vitals)
    assert judged.stage == stage
    assert stage in STAGES
    if stage != "consumer":
        assert judged.actions[0].gain == pytest.approx(2)


def test_a_starved_gpu_is_named() -> None:
    assert "starved at 12%" in judge_loop(loop(8, 2), Vitals(10, (0.5,), gpu_busy=0.12)).sentence


def test_settings() -> None:
    good = Settings(6, True, 8, pin_memory=True, non_blocking=True, persistent_workers=True)
    assert judge_settings(replace(good, cuda=True, epochs=90)) == []
    for change, setting in [
        ({"workers": 2}, "num_workers"),
        ({"workers": 16}, "num_workers"),
        ({"ranks": 4}, "num_workers"),
        ({"pin_memory": False, "cuda": True}, "pin_memory"),
        ({"non_blocking": False, "cuda": True}, "non_blocking"),
        ({"persistent_workers": False, "epochs": 9}, "persistent_workers"),
    ]:
        (found,) = judge_settings(replace(good, **change))  # type: ignore[arg-type] # names above
        assert found.setting == setting
    assert judge_settings(replace(good, pin_memory=False)) == []  # nothing to copy to
    times = loop(1, 8, epochs=4, first=6.0)
    (found,) = judge_settings(replace(good, persistent_workers=False, epochs=4), times)
    assert "1.50 s" in found.effect
