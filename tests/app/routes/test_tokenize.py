"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import tokenizers

from app.serving_engine import EngineState
from tests.app.local_engine import LocalEngine


async def test_text_there_and_back(http: httpx.AsyncClient, checkpoint: Path) -> None:
    text = "The author of all our woes — café 🙂."
    expected = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    response = await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    answer = response.json()
    assert answer["tokens"] == expected
    assert answer["count"] == len(expected)
    assert answer["max_model_len"] == 512
    assert len(answer["token_strs"]) == len(expected)
    back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_conversation_goes_through_the_template(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    back = (await http.post("/detokenize", json={"tokens": tokens})).json()
    assert back == {"prompt": "<|bos|>user\nhi<|eos|>\n"}


async def test_long_text_is_cut_off_the_loop_and_the_same(http: httpx.AsyncClient) -> None:
    word, count = "devil ", 2000
    one = (await http.post("/tokenize", json={"prompt": word * count})).json()["tokens"]
    back = (await http.post("/detokenize", json={"tokens": one})).json()
    assert back == {"prompt": word * count}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 422, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 422, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, 422, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, 422, "tokens[0]"),
    ],
)
async def test_a_bad_field_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, object], status: int, param: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_half_a_surrogate_pair_is_a_bad_prompt(http: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/tokenize", "/v1/completions"):
        response = await http.post(path, content=b'{"prompt": "\\ud800"}', headers=headers)
        assert response.status_code in (400, 422)
        assert response.json()["error"]["param"] == "prompt"


async def test_it_needs_an_engine_that_was_ready_once_only(
    http: httpx.AsyncClient, engine: LocalEngine
) -> None:
    engine.state = EngineState.RESTARTING
    assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200
    engine.tokenizer = engine.limits = None
    assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 503
