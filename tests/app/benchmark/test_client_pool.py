"""A client for each request under way, used again by the next."""

from __future__ import annotations

import pytest

from app.benchmark.client_pool import ClientPool


async def test_clients_are_lent_to_one_at_a_time_and_used_again() -> None:
    async with ClientPool("http://127.0.0.1:9", "secret", 3.0, count=1) as pool:
        with pool.lend() as first, pool.lend() as second:
            assert first is not second
        with pool.lend() as again:
            assert again in (first, second)
            with pool.lend() as other:
                assert {again, other} == {first, second}
        assert first.headers["authorization"] == "Bearer secret"
        assert not first.is_closed
    assert first.is_closed
    assert second.is_closed


async def test_a_client_whose_request_was_torn_away_is_not_used_again_but_closed() -> None:
    async with ClientPool("http://127.0.0.1:9", None, 3.0, count=0) as pool:
        with pytest.raises(ZeroDivisionError), pool.lend() as client:
            raise ZeroDivisionError
        with pool.lend() as other:
            assert other is not client
    assert client.is_closed
