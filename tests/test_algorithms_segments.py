"""Reductions over ragged sets, against plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentropy.algorithms import segments as s
from typed import typed

rows = st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32), st.booleans()), max_size=12)


@given(rows)
def test_reductions_equal_plain_python(data: list[tuple[int, float, bool]]) -> None:
    index = torch.tensor([i for i, _, _ in data], dtype=torch.int64)
    values = torch.tensor([v if on else math.nan for _, v, on in data], dtype=torch.float32)
    where = torch.tensor([on for _, _, on in data], dtype=torch.bool)
    sets = [[v for i, v, on in data if on and i == k] for k in range(4)]
    count = typed(s.segment_count, index="Int64 n", n=int, where="Bool n", result="Int64 k")
    assert count(index, 4, where).tolist() == [len(x) for x in sets]
    assert s.segment_sum(values, index, 4, where).tolist() == pytest.approx([math.fsum(x) for x in sets], abs=1e-12)
    mean = s.segment_mean(values, index, 4, where).tolist()
    assert mean == pytest.approx([statistics.fmean(x) if x else math.nan for x in sets], abs=1e-12, nan_ok=True)
    for ddof, plain in ((1, statistics.stdev), (0, statistics.pstdev)):
        got = s.segment_std(values, index, 4, where, ddof=ddof).tolist()
        assert got == pytest.approx([plain(x) if len(x) > ddof else 0.0 for x in sets], abs=1e-9)
    spread = s.segment_spread(values, index, 4, where).tolist()
    assert spread == [max(x) - min(x) if x else 0.0 for x in sets]
    any_positive = s.segment_any((values > 0) & where, index, 4).tolist()
    assert any_positive == [any(v > 0 for v in x) for x in sets]


@given(rows)
def test_suffix_sums_stay_inside_their_set(data: list[tuple[int, float, bool]]) -> None:
    data = sorted(data)
    index = torch.tensor([i for i, _, _ in data], dtype=torch.int64)
    values = torch.tensor([v for _, v, _ in data], dtype=torch.float32)
    expected = [math.fsum(w for j, w, _ in data[at:] if j == i) for at, (i, _, _) in enumerate(data)]
    assert s.suffix_sum(values, index, 4).tolist() == pytest.approx(expected, abs=1e-9)


def test_an_entry_left_out_cannot_poison_its_set() -> None:
    values = torch.tensor([1.0, math.nan, math.inf, 3.0])
    index = torch.tensor([0, 0, 0, 0])
    where = torch.tensor([True, False, False, True])
    assert s.segment_mean(values, index, 1, where).item() == 2.0
    assert s.segment_std(values, index, 1, where, ddof=1).item() == pytest.approx(math.sqrt(2))
    assert s.segment_spread(values, index, 1, where).item() == 2.0


def test_no_sets_at_all() -> None:
    none = torch.zeros(0)
    index = torch.zeros(0, dtype=torch.int64)
    assert s.segment_mean(none, index, 0).shape == (0,)
    assert s.segment_count(index, 3).tolist() == [0, 0, 0]
    assert s.suffix_sum(none, index, 0).shape == (0,)
