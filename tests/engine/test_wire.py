import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.config import Constraint, SamplingParams
from winnow.engine.messages import Add, Stepped
from winnow.engine.output import EngineStats, Output, Usage
from winnow.engine.wire import Channel, Decoder, encode
from winnow.errors import CapacityError
from winnow.ops.sample import Logprobs

messages = st.lists(st.binary(max_size=50) | st.text(max_size=20) | st.integers(), max_size=6)


@settings(max_examples=100, deadline=None)
@given(messages, st.lists(st.integers(1, 40), min_size=1))
def test_messages_come_out_whole_and_in_order_however_the_bytes_are_cut(sent, cuts):
    data = b"".join(map(encode, sent))
    decoder, got, place, turn = Decoder(), [], 0, 0
    while place < len(data):
        size = cuts[turn % len(cuts)]
        got += decoder.feed(data[place : place + size])
        place, turn = place + size, turn + 1
    assert got == sent


def test_what_processes_say_to_each_other_survives_the_wire():
    params = SamplingParams(stop="x", constraint=Constraint("regex", "a+"), logit_bias={5: 1.0})
    output = Output("r", (1, 2), "é", (Logprobs(-1.0, ((3, -0.5),)),), "stop", Usage(1, 2, 0))
    refused = Output("s", finish_reason="error", error=CapacityError("needs 9 pages"))
    add = Add("r", tuple(range(300)), params, "salt", b"grammar")
    stepped = Stepped((output, refused), EngineStats(*range(10)), 0.25, ("r",))
    got_add, got_stepped = Decoder().feed(encode(add) + encode(stepped))
    assert got_add == add
    assert got_stepped.outputs[0] == output
    assert got_stepped.stats == stepped.stats
    error = got_stepped.outputs[1].error
    assert isinstance(error, CapacityError)
    assert str(error) == "needs 9 pages"


def test_a_channel_takes_what_is_there_and_waits_only_when_asked():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, other = Channel(ours), Channel(theirs)
        assert channel.receive(wait=False) == []
        theirs.sendall(encode("half")[:9])
        assert channel.receive(wait=False) == []
        theirs.sendall(encode("half")[9:])
        other.send("whole")
        assert channel.receive(wait=True) == ["half", "whole"]


def test_a_message_larger_than_the_sockets_buffer_arrives_while_it_is_read():
    ours, theirs = socket.socketpair()
    big = bytes(5_000_000)
    with ours, theirs:
        sender = threading.Thread(target=Channel(theirs).send, args=(big,))
        sender.start()
        assert Channel(ours).receive(wait=True) == [big]
        sender.join()


def test_a_channel_whose_other_end_is_gone_says_so():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(EOFError, match="closed"):
        Channel(ours).receive(wait=False)
