from __future__ import annotations

import json
import re
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.base import Overheads
from engine.memory.ledger import Ledger

signed = st.integers(-(1 << 40), 1 << 40)
tags = st.dictionaries(
    st.sampled_from(["weights/a", "weights/b", "kv", "workspace", "repack/x"]), st.integers(0, 1 << 40)
)
ledgers = st.builds(
    lambda total, free, tags, overheads: Ledger.close(
        total=total, free=free, tags=tags, overheads=overheads, moment="after load", device="cuda"
    ),
    st.integers(0, 1 << 41),
    signed,
    tags,
    st.builds(Overheads, signed, signed, signed, signed, signed, signed),
)


@given(ledgers)
def test_it_closes_to_the_total(ledger: Ledger) -> None:
    assert sum(ledger.entries().values()) == ledger.total
    assert sum(ledger.segments.values()) == ledger.tagged == sum(ledger.tags.values())
    known = ledger.pool_slack + ledger.rounding + ledger.context + ledger.library + ledger.other_processes
    known += ledger.bypass
    assert ledger.total == ledger.free + ledger.tagged + known + ledger.residual


@given(ledgers)
def test_it_survives_json(ledger: Ledger) -> None:
    facts = json.loads(json.dumps(ledger.to_dict()))
    assert facts == asdict(ledger) | {"residual": ledger.residual, "segments": ledger.segments}
    assert Ledger.from_dict(facts) == ledger


@given(ledgers)
def test_the_table_adds_up(ledger: Ledger) -> None:
    title, *rows, _, total = ledger.render().splitlines()
    assert title == "memory of the cuda device, after load"
    sizes = [int(re.sub(",", "", row.split()[-1])) for row in rows]
    assert sum(sizes) == int(total.split()[-1].replace(",", "")) == ledger.total
    assert any(row.startswith("residual") for row in rows)
    assert len({len(row) for row in (*rows, total)}) == 1


def test_an_estimated_free_is_called_one() -> None:
    ledger = Ledger(total=10, free=4, tags={"kv": 6}, free_is_read=False)
    assert ledger.residual == 0
    assert ledger.render().splitlines()[0] == "memory of the host device (free is an estimate)"
