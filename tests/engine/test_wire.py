"""Messages over the socket pair."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig, EngineLimits
from engine.failure import FailureReporter
from engine.memory.settings import TraceSettings
from engine.messages import (
    Abort,
    AddRequest,
    EngineFailed,
    EngineStats,
    FinishReason,
    RequestUpdate,
    Shutdown,
    StepOutputs,
)
from engine.sampling_params import SamplingParams
from engine.wire import (
    EngineReady,
    FailureReport,
    IntoEngine,
    LoadProgress,
    LoadRefused,
    MemoryReport,
    StartEngine,
    WireSocket,
    encode_frame,
    from_engine,
    to_engine,
)

STATS = EngineStats(
    step=1,
    num_running=1,
    num_waiting=0,
    num_blocks=4,
    num_used_blocks=1,
    prefill_tokens=3,
    decode_tokens=0,
    preemptions=0,
    prefix_queries=0,
    prefix_hits=0,
)
LIMITS = EngineLimits(
    max_num_seqs=1,
    max_model_len=16,
    max_num_batched_tokens=16,
    block_size=16,
    max_logits_rows=1,
    vocab_size=10,
)
INTO = [
    StartEngine(EngineConfig(model="m", threads=2), TraceSettings(trace=True, file=Path("/t/x")), 20),
    StartEngine(EngineConfig(model="m"), TraceSettings(), 30),
    AddRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        params=SamplingParams(stop=("x",), logit_bias={3: 1.5}, stop_token_ids=(7,)),
    ),
    Abort(["a", "b"]),
    Shutdown(),
]


def out_of(tmp_path: Path) -> list[msgspec.Struct]:
    reporter = FailureReporter(tmp_path, EngineConfig(model="m"), output=open("/dev/null", "w"))  # noqa: SIM115
    update = RequestUpdate(request_id="a", new_token_ids=[5], finish_reason=FinishReason.LENGTH)
    messages = [
        LoadProgress("load", 1, 2),
        EngineReady(LIMITS, "ready"),
        LoadRefused("no", is_usage=True),
        StepOutputs([update], STATS),
        MemoryReport({"total": 1, "tags": {"kv": 1}}, None),
        FailureReport(reporter.begin(RuntimeError("x"), doing="a test", fatal=True)),
        EngineFailed("x", "id"),
    ]
    reporter.output.close()
    return messages


def test_messages_arrive_as_they_were_sent(tmp_path: Path) -> None:
    decoder = to_engine()
    assert list(decoder.feed(b"".join(map(encode_frame, INTO)))) == INTO
    sent = out_of(tmp_path)
    assert list(from_engine().feed(b"".join(map(encode_frame, sent)))) == sent


def test_a_path_need_not_be_utf8() -> None:
    trace = TraceSettings(trace=True, file=Path("t\udcff"))
    message = StartEngine(EngineConfig(model="m"), trace, 30)
    assert list(to_engine().feed(encode_frame(message))) == [message]


@given(data=st.data())
def test_however_they_are_cut(data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, INTO))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = to_engine()
    received = [
        message
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for message in decoder.feed(stream[begin:end])
    ]
    assert received == INTO


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", encode_frame(Shutdown())])
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        list(from_engine().feed(data))


def test_a_reader_that_falls_behind_holds_the_sender_back() -> None:
    ours, theirs = socket.socketpair()
    wire = WireSocket(theirs)
    sent = []

    def send() -> None:
        for number in range(2000):
            wire.send(LoadProgress("x" * 1000, number, 2000))
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert len(sent) < 2000
    decoder, received = from_engine(), []
    while len(received) < 2000:
        received += list(decoder.feed(ours.recv(1 << 16)))
    thread.join()
    assert [message.done for message in received if isinstance(message, LoadProgress)] == list(range(2000))
    ours.close()
    assert list(wire.messages()) == []
    theirs.close()


def test_messages_are_read_until_the_other_side_is_gone() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"".join(map(encode_frame, INTO)))
    ours.close()
    received: list[IntoEngine] = list(WireSocket(theirs).messages())
    assert received == INTO
    theirs.close()
