"""What is sent to a server, what is read from its answers, and what happens when there are none."""

import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.vllm_server import StandIn
from trainer.errors import TrainingError
from trainer.rl.types import Sampling
from trainer.rl.vllm.client import ServerClient, ServerError, Span
from trainer.rl.vllm.pool import Pool

SAMPLING = Sampling(0.7, top_p=0.9, top_k=5, stop_ids=(7, 3))


@pytest.fixture
def server():
    with StandIn() as server:
        yield server


def client_of(server: StandIn, seconds: float = 10.0) -> ServerClient:
    return ServerClient(server.url, seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_request_says_all_that_the_draw_depends_on(server):
    client_of(server).generate([4, 5], 3, 2**62, SAMPLING, salt="s")
    path, _, body = server.calls[0]
    assert path == "/inference/v1/generate"
    parameters = body.pop("sampling_params")
    assert body == {"token_ids": [4, 5], "stream": False, "cache_salt": "s"}
    assert parameters == {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 2**62,
        "stop_token_ids": [3, 7],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_an_answer_holds_tokens_logprobs_and_the_weights_of_each(server):
    server.spans = lambda count: [
        {"version": "a:1", "start": 0, "end": 2},
        {"version": "a:2", "start": 2, "end": count},
    ]
    answer = client_of(server).generate([4], 3, 0, SAMPLING)
    assert (answer.ids, answer.logprobs) == ([5, 6, 7], [-5.0, -6.0, -7.0])
    assert answer.finish_reason == "stop"
    assert answer.spans == [Span("a:1", 0, 2), Span("a:2", 2, 3)]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failing_server_may_recover(server, status):
    server.trouble["/inference/v1/generate"] = [status]
    with pytest.raises(ServerError, match=f"generate answered {status}: .*made up") as caught:
        client_of(server).generate([4], 3, 0, SAMPLING)
    assert caught.value.may_pass and caught.value.status == status and server.url in str(caught.value)


def test_a_wrong_request_stays_wrong_and_says_what_the_server_lacks(server):
    server.trouble["/inference/v1/generate"] = [404]
    with pytest.raises(ServerError, match="--enable-scale-out") as caught:
        client_of(server).generate([4], 3, 0, SAMPLING)
    assert not caught.value.may_pass


def test_a_hanging_server_is_given_up(server):
    server.trouble["/inference/v1/generate"] = ["hang"]
    with pytest.raises(ServerError, match="no answer within 0.2 s") as caught:
        client_of(server, 0.2).generate([4], 3, 0, SAMPLING)
    assert caught.value.timed_out and caught.value.may_pass


def test_a_dropped_connection_and_no_server_at_all(server):
    server.trouble["/weight_info"] = ["drop"]
    with pytest.raises(ServerError) as caught:
        client_of(server).label()
    assert caught.value.may_pass and not caught.value.timed_out
    nobody = ServerClient(f"127.0.0.1:{free_port()}", 10.0)
    assert not nobody.is_healthy()
    with pytest.raises(ServerError, match="refused"):
        nobody.label()


def test_a_mangled_answer_is_told_apart_from_a_failure(server):
    server.complete = lambda prompt, parameters: ([1, 2], [-1.0, -2.0])
    server.spans = lambda count: [{"version": "a:1"}]
    with pytest.raises(ServerError, match="not one of /inference/v1/generate") as caught:
        client_of(server).generate([4], 3, 0, SAMPLING)
    assert not caught.value.may_pass


def test_an_error_survives_the_way_to_another_rank():
    error = pickle.loads(pickle.dumps(ServerError("http://a", "is away", 503, True)))
    assert (str(error), error.status, error.timed_out) == ("http://a: is away", 503, True)


@pytest.mark.parametrize("url", ["ftp://a:1", "http://", "//"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ServerError, match="http://host:port"):
        ServerClient(url, 1.0)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_loading_weights_keeps_the_order_of_calls(server, tmp_path, keep_cache):
    client_of(server).load(tmp_path, "a:1", keep_cache=keep_cache)
    assert server.paths() == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    assert server.calls[1][1] == {"mode": "keep", "clear_cache": "false" if keep_cache else "true"}
    assert (server.directory, server.label, server.is_paused) == (tmp_path, "a:1", False)


def test_files_that_arrive_late_are_waited_for(server, tmp_path):
    server.trouble["/update_weights"] = [500]
    client_of(server).load(tmp_path, "a:1", keep_cache=False)
    assert server.paths().count("/update_weights") == 2 and server.label == "a:1"


def test_half_loaded_weights_are_never_served(server, tmp_path):
    server.trouble["/update_weights"] = [500, 500, 500]
    with pytest.raises(ServerError, match="/update_weights answered 500"):
        client_of(server).load(tmp_path, "a:1", keep_cache=False)
    assert server.is_paused and server.label == "default"


# --- several servers ------------------------------------------------------------------------------------------------


def ask(server: ServerClient, number: int) -> tuple[str, int]:
    return server.url, server.generate([number], 1, 0, SAMPLING).ids[0]


def pool_of(*servers: StandIn, at_once: int = 8, patience_seconds: float = 20.0, seconds: float = 10.0, first: int = 0):
    clients = [client_of(server, seconds) for server in servers]
    return Pool(clients, at_once=at_once, patience_seconds=patience_seconds, first=first)


def test_requests_are_spread_evenly_and_bounded_and_come_back_in_order():
    with StandIn(delay_seconds=0.02) as a, StandIn(delay_seconds=0.02) as b:
        answers = pool_of(a, b, at_once=6).map(ask, list(range(40)))
        assert [token for _, token in answers] == list(range(1, 41))
        counts = [sum(url == server.url for url, _ in answers) for server in (a, b)]
        assert min(counts) >= 12
        assert a.most_at_once + b.most_at_once <= 6 and max(a.most_at_once, b.most_at_once) > 1


def test_ranks_begin_with_different_servers():
    with StandIn() as a, StandIn() as b:
        assert [pool_of(a, b, first=rank).map(ask, [1])[0][0] for rank in range(3)] == [a.url, b.url, a.url]


@pytest.mark.parametrize("trouble", [500, "drop", "hang"])
def test_a_request_goes_to_another_server_when_one_fails(trouble):
    with StandIn() as a, StandIn() as b:
        a.trouble["/inference/v1/generate"] = [trouble]
        assert pool_of(a, b, seconds=0.3).map(ask, [1]) == [(b.url, 2)]


def test_a_server_that_comes_back_gets_the_waiting_request():
    port = free_port()
    clients = [ServerClient(f"http://127.0.0.1:{port}", 5.0)]
    late: list[StandIn] = []
    threading.Timer(0.5, lambda: late.append(StandIn(port=port))).start()
    assert Pool(clients, at_once=1, patience_seconds=20.0).map(ask, [1]) == [(clients[0].url, 2)]
    late[0].close()


def test_when_nothing_helps_every_server_and_reason_is_named():
    with StandIn() as a:
        a.trouble["/inference/v1/generate"] = [500] * 100
        nobody = ServerClient(f"http://127.0.0.1:{free_port()}", 1.0)
        pool = Pool([client_of(a), nobody], at_once=4, patience_seconds=0.6)
        with pytest.raises(TrainingError) as caught:
            pool.map(ask, [1, 2, 3])
        assert f"{a.url}: /inference/v1/generate answered 500" in str(caught.value)
        assert nobody.url in str(caught.value) and "refused" in str(caught.value)


def test_a_request_that_failed_at_one_server_goes_to_the_other_though_both_rest():
    """The other has failed somebody else's request, and later: it has rested for a shorter time."""
    a, b, b_failed = ServerClient("http://a", 1.0), ServerClient("http://b", 1.0), threading.Event()
    asked: dict[int, list[ServerClient]] = {1: [], 2: []}

    def ask(server: ServerClient, number: int) -> str:
        asked[number].append(server)
        if len(asked[number]) == 1:
            others = asked[3 - number]
            while not others:  # each request is at a server of its own
                time.sleep(0.001)
            if server is b:
                while pool._rests_until[a.url] == 0.0:  # a fails first
                    time.sleep(0.001)
                b_failed.set()
            raise ServerError(server.url, "made up")
        return server.url

    class Pair(Pool):
        def _pause(self, deadline: float) -> float:
            assert b_failed.wait(60)
            while not all(self._rests_until.values()):
                time.sleep(0.001)
            return 0.0

    pool = Pair([a, b], at_once=2, patience_seconds=60.0)
    assert sorted(pool.map(ask, [1, 2])) == ["http://a", "http://b"]
    assert all(first is not second for first, second in asked.values())


def test_a_closed_pool_sends_nothing_more():
    """A thread that generates ahead would else go through all it has left, while the run waits for it to end."""
    with StandIn(delay_seconds=0.02) as a:
        pool, first = pool_of(a, at_once=1), threading.Event()

        def ask_and_tell(server: ServerClient, number: int) -> tuple[str, int]:
            first.set()
            return ask(server, number)

        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(pool.map, ask_and_tell, [*range(10_000)])
            assert first.wait(60)
            pool.close()
            with pytest.raises(TrainingError, match="the engine is closed"):
                answers.result(60)
        assert 0 < len(a.calls) < 10_000


def test_a_closed_pool_breaks_off_what_is_under_way():
    """A server of somebody else's goes on, and may take minutes for an answer that nobody needs any more."""
    with StandIn() as a:
        a.trouble["/inference/v1/generate"] = ["hang"] * 2
        pool = pool_of(a, seconds=600.0)
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(pool.map, ask, [1, 2])
            deadline = time.monotonic() + 60
            while len(a.calls) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            pool.close()
            with pytest.raises(TrainingError, match="the engine is closed"):
                answers.result(60)


def test_a_wrong_request_is_not_sent_again():
    with StandIn() as a, StandIn() as b:
        a.trouble["/inference/v1/generate"] = [400]
        with pytest.raises(TrainingError, match="would fail again"):
            pool_of(a, b).map(ask, [1])
        assert b.calls == []


def test_time_outs_are_not_repeated_for_ever():
    with StandIn() as a:
        a.trouble["/inference/v1/generate"] = ["hang"] * 10
        with pytest.raises(TrainingError, match="3 time-outs"):
            pool_of(a, seconds=0.1, patience_seconds=60.0).map(ask, [1])
