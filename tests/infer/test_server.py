"""`eagle3-infer --server` against a small server that really streams, counts, fails, falls silent and hangs up."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle3_infer import server, server_run
from eagle3_infer.cli import main, parse_settings
from eagle3_infer.endpoint import Endpoint, Reply, ServerError, _collect, _events
from eagle3_infer.notes import server_notes
from eagle3_infer.prompts import Prompt
from eagle3_infer.report import ModeRun, summarise_mode
from eagle3_infer.server import MOST_FAILURES, WARM_UP_TOKENS, chat_body
from eagle3_infer.server_report import Answer, Repeat
from eagle3_infer.table import render_report

WORDS = ["Hel", "lo", " there", ", ", "friend"]
PROMPT = Prompt("1", "c", ("x",))


class Stub(ThreadingHTTPServer):
    """Replies with WORDS, a token each, in pieces of one, two and two: rounds that accept one draft of two.

    Attributes:
        script: what happens to request 0, 1, ...: ok, 500, error, hangup, cut, silent; ok beyond.
        delay: seconds before the first piece and between pieces.
        listed: the model's id; counts: tokens by usage; key: of the pieces in a delta.
        metrics: path of the counters; beside them `/metrics` is TensorRT-LLM's list of JSON; looked_at: paths.
    """

    daemon_threads = True
    failure = "out of\nmemory"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.delay, self.bodies, self.headers = {}, 0.0, [], []
        self.usage = self.models = True
        self.metrics, self.looked_at = "/metrics", []
        self.listed, self.counts, self.key = "stub", 5, "content"
        self.rounds = self.replies = self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def page(self):
        told = {
            "vllm:generation_tokens": 5 * self.replies,
            "vllm:request_success": self.replies,
            "vllm:spec_decode_num_drafts": self.rounds,
            "vllm:spec_decode_num_draft_tokens": 2 * self.rounds,
            "vllm:spec_decode_num_accepted_tokens": self.rounds,
        }
        lines = [f'{name}_total{{model_name="stub"}} {value}' for name, value in told.items()]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="stub",position="{p}"}} {value}'
            for p, value in enumerate((self.rounds, 0))
        ]
        return "\n".join(lines)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_):
        pass

    def do_GET(self):
        stub = self.server
        if self.path == "/v1/models" and stub.models:
            self.answer(200, json.dumps({"data": [{"id": stub.listed}]}))
        elif stub.metrics and self.path in (stub.metrics, "/metrics"):
            stub.looked_at.append(self.path)
            self.answer(200, stub.page() if self.path == stub.metrics else "[]")
        else:
            self.answer(404, '{"detail": "Not Found"}')

    def do_POST(self):
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            number = len(stub.bodies)
            stub.bodies.append(body)
            stub.headers.append(dict(self.headers))
            stub.under_way += 1
            stub.most_under_way = max(stub.most_under_way, stub.under_way)
        try:
            self.chat(stub.script.get(number, "ok"), body)
        except OSError:
            pass
        finally:
            with stub.lock:
                stub.under_way -= 1

    def chat(self, what, body):
        if self.path != "/v1/chat/completions":
            self.answer(404, '{"detail": "Not Found"}')
            return
        if what == "500":
            self.answer(500, json.dumps({"error": {"message": self.server.failure, "code": 500}}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if what == "silent":
            time.sleep(1)
            return
        if what == "error":
            self.event({"error": {"message": "the engine died"}})
            return
        for piece in (WORDS[:1], WORDS[1:3], WORDS[3:]):
            time.sleep(self.server.delay)
            self.event({"choices": [{"delta": {self.server.key: "".join(piece)}}]})
            if what in ("hangup", "cut"):
                # without and with the end of the chunked body
                self.wfile.write(b"0\r\n\r\n" if what == "cut" else b"")
                self.close_connection = True
                return
        self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        with self.server.lock:
            self.server.rounds += 2
            self.server.replies += 1
        if self.server.usage:
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": self.server.counts}})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, data):
        text = f": comment\ndata: {json.dumps(data)}\n\n".encode()
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def stub():
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"question_id": 1, "category": "one", "turns": ["Hello", "Again"]},
        {"prompt": "مرحبا 🦅", "category": "two"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def measure(stub, prompts, tmp_path, capsys):
    """Run the command; gives exit code, report, and what was printed."""

    def run(*flags):
        path = tmp_path / "report.json"
        code = main(["--server", stub.url, "--prompts", str(prompts), "--json", str(path), *flags])
        report = json.loads(path.read_text()) if path.exists() else None
        return code, report, capsys.readouterr()

    return run


def test_report(stub, measure):
    stub.delay = 0.02
    code, report, printed = measure("--max-new-tokens", "9")
    assert code == 0
    mode = report["modes"]["server"]
    assert set(mode) == {*summarise_mode(ModeRun("plain", {}), {}), "server"}
    # three replies of five tokens in two rounds each; the warm-up is not among them
    assert (mode["tokens"], mode["rounds"], mode["tau"]) == (15, 6, 2.0)
    assert mode["accepted_by_level"] == [6, 0]
    assert (mode["nodes_per_round"], mode["utilisation"]) == (2.0, 0.5)
    # a piece each 20 ms or more: one before the first token, two after it
    each = mode["server"]
    assert each["first_token_seconds"]["median"] >= 0.02
    assert each["request_seconds"]["median"] >= 0.06
    assert mode["tokens_per_second"] < 4 / 0.04
    assert mode["seconds_by_stage"]["prefill"] + mode["seconds_by_stage"]["other"] == pytest.approx(mode["seconds"])
    assert (each["model"], each["requests"], each["failed"]) == ("stub", 3, 0)
    assert {name: group["tokens"] for name, group in mode["by_category"].items()} == {"one": 10, "two": 5}
    rows = [(row["id"], row["turn"], row["text"], row["tokens"]) for row in report["outputs"]]
    text = "".join(WORDS)
    assert rows == [("1", 0, text, 5), ("1", 1, text, 5), ("2", 0, text, 5)]
    assert "tau 2.00 by vLLM's counters" in printed.out
    assert render_report(report) in printed.out


def test_what_the_server_is_asked(stub, measure):
    measure("--max-new-tokens", "9", "--temperature", "0.5", "--top-k", "4", "--seed", "3", "--stop", "X")
    warm_up, *asked = stub.bodies
    assert warm_up["messages"][0]["content"] not in ("Hello", "مرحبا 🦅")
    assert [body["messages"][-1]["content"] for body in asked] == ["Hello", "Again", "مرحبا 🦅"]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "".join(WORDS)}
    for body in asked:
        assert body["stream"] is True
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("stub", 9, 0.5)
        assert (body["top_k"], body["seed"], body["stop"]) == (4, 3, ["X"])
        # what is not set is not sent: many servers refuse what they do not know
        assert not body.keys() & {"min_p", "repetition_penalty", "top_p", "logit_bias"}


def test_page_and_charts(stub, measure, tmp_path):
    """Of a report in which only the server's own figures are known."""
    pytest.importorskip("matplotlib")
    page, charts = tmp_path / "page.html", tmp_path / "charts"
    code, _, printed = measure("--html", str(page), "--plot", str(charts))
    assert code == 0, printed.err
    text = page.read_text(encoding="utf-8")
    assert "server" in text
    assert "2.00" in text
    assert [path.name for path in charts.glob("*tau*.png")], list(charts.iterdir())


def test_sets_are_told_apart(stub, measure, prompts, tmp_path):
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"prompt": "x"}))
    code, report, printed = measure("--prompts", f"{prompts},{more}")
    assert code == 0
    assert {name: group["tokens"] for name, group in report["modes"]["server"]["by_set"].items()} == {
        "prompts": 15,
        "more": 5,
    }
    assert "by set" in printed.out


def test_key_and_path(stub, measure, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    stub.models = False
    code, report, _ = measure("--server", f"{stub.url}/v1/", "--server-model", "other")
    assert code == 0
    assert {body["model"] for body in stub.bodies} == {"other"}
    assert {headers["Authorization"] for headers in stub.headers} == {"Bearer secret"}
    assert "secret" not in json.dumps(report)


def test_no_metrics_page(stub, measure):
    stub.metrics = None
    code, report, printed = measure()
    mode = report["modes"]["server"]
    assert code == 0
    assert (mode["tau"], mode["rounds"], mode["utilisation"], mode["server"]["counted"]) == (None, None, None, None)
    assert mode["tokens"] == 15
    assert "acceptance          unknown" in printed.out


def test_counters_beside_a_page_of_json(stub, measure, monkeypatch):
    """TensorRT-LLM: `/metrics` answers, too, and knows no counters; two rounds a reply of five tokens."""
    page = "trtllm_generation_tokens_total {}\ntrtllm_request_success_total {}\n"
    page += "trtllm_spec_decode_num_draft_tokens_total {}\ntrtllm_spec_decode_num_accepted_tokens_total {}\n"
    monkeypatch.setattr(Stub, "page", lambda self: page.format(*(n * self.replies for n in (5, 1, 4, 2))))
    stub.metrics = "/prometheus/metrics"
    code, report, printed = measure()
    mode = report["modes"]["server"]
    assert code == 0
    assert (mode["tau"], mode["rounds"], mode["server"]["metrics"]) == (2.0, 6, "/prometheus/metrics")
    assert "by TensorRT-LLM's counters" in printed.out
    # it is told once, and forgotten by the server
    assert "/metrics" not in stub.looked_at


@pytest.mark.parametrize("counters", ["/metrics", "/prometheus/metrics"])
def test_counters_that_appear_with_the_first_reply(stub, measure, monkeypatch, counters):
    """A page without any before the run, and maybe one of no known engine beside it: what appears was zero."""
    pages = iter(["", "vllm:generation_tokens_total 15"])
    monkeypatch.setattr(Stub, "page", lambda self: next(pages))
    stub.metrics = counters
    _, report, _ = measure()
    server = report["modes"]["server"]["server"]
    assert (server["counted"]["tokens"], server["metrics"]) == (15, counters)


def test_no_usage(stub, measure):
    """Pieces of a stream are no tokens: without a count there is no speed."""
    stub.usage = False
    code, report, printed = measure()
    mode = report["modes"]["server"]
    assert code == 0
    assert mode["tokens"] is mode["tokens_per_second"] is mode["end_to_end_tokens_per_second"] is None
    assert mode["server"]["request_seconds"]["median"] > 0
    assert "no usage" in printed.out


def test_other_clients_are_told(stub, measure):
    def interfere():
        while len(stub.bodies) < 3:
            time.sleep(0.005)
        stub.replies += 7

    stub.delay = 0.02
    thread = threading.Thread(target=interfere, daemon=True)
    thread.start()
    _, _, printed = measure()
    thread.join()
    assert "others used the server meanwhile" in printed.out


@pytest.mark.parametrize(
    "what, said",
    [
        ("500", "answered 500: out of memory"),
        ("error", "the engine died"),
        ("hangup", "hung up in the middle"),
        ("cut", "hung up in the middle"),
    ],
)
def test_a_request_that_fails_is_counted_and_left_out(stub, measure, what, said):
    """Request 2 is the second turn of the first prompt; the other prompt goes on."""
    stub.script = {2: what}
    code, report, printed = measure()
    mode = report["modes"]["server"]
    assert code == 2
    assert (mode["tokens"], mode["server"]["requests"], mode["server"]["failed"]) == (10, 2, 1)
    assert said in mode["server"]["failures"][0]
    assert "prompt 1, turn 2" in mode["server"]["failures"][0]
    assert said in printed.out
    assert report["run"]["notes"][-1] in printed.out


@pytest.mark.parametrize(
    "lost, seconds, answered",
    [
        ([], 4.0, 4.0),
        # between the two replies
        ([(2.0, 12.0)], 14.0, 4.0),
        # beside both, beside the second, and after both, when nobody waited for it
        ([(0.0, 4.0)], 4.0, 2.0),
        ([(2.0, 9.0)], 4.0, 4.0 * 4 / 6),
        ([(4.0, 600.0)], 4.0, 4.0),
    ],
)
def test_requests_without_an_answer_are_in_no_speed(lost, seconds, answered):
    """Two replies of five tokens, each a second before its first token and a second after it."""
    repeat = Repeat([Answer(PROMPT, 0, Reply("x", "stop", 1.0, 2.0, 5))] * 2, lost=lost, seconds=seconds)
    assert repeat.answered == pytest.approx(answered)
    assert repeat.rate() == pytest.approx(8 / (answered / 2))


def test_a_silent_request_slows_nothing_down(stub, measure, monkeypatch):
    """Two replies one after the other, and a longer silence between them."""
    monkeypatch.setattr(server_run, "Endpoint", lambda url: Endpoint(url, idle_seconds=0.6))
    stub.script, stub.delay = {2: "silent"}, 0.05
    code, report, printed = measure()
    mode, rows = report["modes"]["server"], report["outputs"]
    assert code == 2
    assert "was silent for 0.6 s" in printed.out
    decode = sum(row["seconds"] - row["first_token_seconds"] for row in rows)
    assert mode["tokens_per_second"] == pytest.approx(8 / decode, rel=0.3)
    whole = sum(row["seconds"] for row in rows)
    assert mode["seconds"] == pytest.approx(whole, rel=0.3)
    assert mode["end_to_end_tokens_per_second"] == pytest.approx(10 / mode["seconds"])
    assert mode["by_category"]["one"]["tokens_per_second"] == pytest.approx(mode["tokens_per_second"], rel=0.3)


def test_requests_under_way_at_an_interrupt_are_in_no_speed(stub, measure, monkeypatch, tmp_path):
    """Of three at once one is answered: a third of the time is its, and what the others generated is nobody else's."""

    def show(self, text):
        if text.startswith("server: 1 of"):
            signal.raise_signal(signal.SIGINT)

    three = tmp_path / "three.jsonl"
    three.write_text("\n".join(json.dumps({"prompt": f"{i}"}) for i in range(3)))
    monkeypatch.setattr(server_run.Progress, "show", show)
    # tokens are counted as they are generated, not once a reply is whole
    monkeypatch.setattr(Stub, "page", lambda self: f"vllm:generation_tokens_total {100 * len(self.bodies)}")
    stub.script, stub.delay = {2: "silent", 3: "silent"}, 0.1
    code, report, printed = measure("--prompts", str(three), "--batch", "3")
    [row], mode = report["outputs"], report["modes"]["server"]
    assert code == 130
    assert mode["server"]["counted"]["tokens"] == 300
    assert "others" not in printed.out
    assert mode["seconds"] == pytest.approx(row["seconds"] / 3, rel=0.2)


@pytest.mark.parametrize("what, said", [("500", "answered 500"), ("hangup", "hung up")])
def test_a_server_that_fails_at_once_is_an_error(stub, measure, what, said):
    stub.script = {0: what}
    code, report, printed = measure()
    assert (code, report) == (2, None)
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_server_that_dies_is_given_up(stub, measure, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join(json.dumps({"prompt": f"{i}"}) for i in range(40)))
    stub.script = dict.fromkeys(range(3, 99), "500")
    code, report, printed = measure("--prompts", str(many))
    assert code == 2
    assert report["modes"]["server"]["tokens"] == 10
    assert len(stub.bodies) == 3 + MOST_FAILURES
    assert "gave up" in printed.out


def test_ctrl_c_before_the_first_request(measure, monkeypatch):
    """While the metrics page is fetched, which a server under load may leave hanging."""
    monkeypatch.setattr(Endpoint, "page", lambda *_: signal.raise_signal(signal.SIGINT))
    code, report, printed = measure()
    assert code == 130
    assert (report["modes"], report["outputs"], report["run"]["interrupted"]) == ({}, [], True)
    assert "nothing was measured" in printed.out


def test_a_second_ctrl_c_loses_nothing(stub, measure, monkeypatch):
    def impatient(report):
        signal.raise_signal(signal.SIGINT)
        return render_report(report)

    def show(self, text):
        if text.startswith("server: 1 of"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server_run.Progress, "show", show)
    monkeypatch.setattr(server_run, "render_report", impatient)
    # counters that never arrive are not waited for
    monkeypatch.setattr(Stub, "page", lambda self: "vllm:generation_tokens_total 1")
    began = time.monotonic()
    code, report, _ = measure()
    assert code == 130
    assert time.monotonic() - began < 1.5
    assert len(report["outputs"]) == 2


def test_what_a_server_writes_cannot_act_on_the_terminal(stub, measure, monkeypatch):
    monkeypatch.setattr(Stub, "failure", "\x1b[2J\u202egone")
    stub.script = {2: "500"}
    code, report, printed = measure("--server-model", "stub\x1b[31m")
    assert code == 2
    assert not {"\x1b", "\u202e"} & set(printed.out + printed.err)
    assert "model stub[U+001B][31m" in printed.out
    assert "[U+001B][2J[U+202E]gone" in printed.out
    # the file has it as it was
    assert report["run"]["target"] == "stub\x1b[31m"


def test_a_model_that_the_counters_do_not_know_is_told(measure):
    _, report, printed = measure("--server-model", "alias")
    assert "know no model alias: they are of all its models" in printed.out
    assert report["modes"]["server"]["server"]["counted"]["all_models"]
    assert "know no model" not in measure()[2].out


def test_a_warm_up_that_is_counted_late_accuses_nobody(stub, measure, monkeypatch):
    pages = iter([0, 5 * 3 + WARM_UP_TOKENS])
    monkeypatch.setattr(Stub, "page", lambda self: f"vllm:generation_tokens_total {next(pages)}")
    _, report, printed = measure()
    assert report["modes"]["server"]["server"]["counted"]["tokens"] == 5 * 3 + WARM_UP_TOKENS
    assert "others" not in printed.out


@pytest.mark.parametrize(
    "event, said",
    [
        ({"choices": [3]}, "choice that is no object"),
        ({"choices": {"a": 1}}, "choices that are no list"),
        ({"choices": [{"delta": "x"}]}, "delta that is no object"),
        ({"choices": [{"delta": {"content": ["x"]}}]}, "content that is no text"),
        ({"choices": [{"finish_reason": {"a": 1}}]}, "finish_reason that is no text"),
        ({"usage": 5}, "usage that is no object"),
    ],
)
def test_streams_of_another_form(event, said):
    with pytest.raises(ServerError, match=said):
        _collect(iter([event, None]), 0.0)


def test_a_choice_that_is_null_is_passed_over():
    events = [{"choices": [None, {"delta": {"content": "x"}}]}, {"choices": None}, None]
    assert _collect(iter(events), 0.0).text == "x"


@pytest.mark.parametrize("value", ["many", None, True, 8.5, float("nan"), -8, 10**400])
def test_counts_that_are_none_are_not_told(value):
    reply = _collect(iter([{"usage": {"completion_tokens": value, "prompt_tokens": value}}, None]), 0.0)
    assert (reply.tokens, reply.prompt_tokens) == (None, None)


@pytest.mark.parametrize("delta, tokens", [({"content": "x"}, None), ({"reasoning": "x"}, None), ({}, 0)])
def test_no_tokens_is_a_count_where_nothing_came(delta, tokens):
    events = [{"choices": [{"delta": delta}]}, {"usage": {"completion_tokens": 0}}, None]
    assert _collect(iter(events), 0.0).tokens == tokens


@pytest.mark.parametrize("counts", [-8, 0, 10**400])
def test_usage_that_cannot_be(stub, measure, counts):
    """No speed of it, and nobody is accused of the tokens that the engine counted."""
    stub.counts = counts
    code, report, printed = measure()
    mode = report["modes"]["server"]
    assert code == 0
    assert mode["tokens"] is mode["tokens_per_second"] is mode["end_to_end_tokens_per_second"] is None
    assert mode["tau"] == 2.0
    assert "one that cannot be: its tokens are not counted" in printed.out
    assert "others" not in printed.out


def test_an_empty_reply_has_no_first_token():
    replies = [Reply("five", "stop", 1.0, 3.0, 5), Reply("", "stop", None, 1.0, 0)]
    repeat = Repeat([Answer(PROMPT, 0, reply) for reply in replies], seconds=4.0)
    assert repeat.rate() == pytest.approx(4 / 2)


DEEP = b"[" * 100_000


def test_an_event_that_is_nested_without_end():
    with pytest.raises(ServerError, match="no JSON"):
        list(_events([b"data: " + DEEP + b"\n"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("listed", [None, 7, "", {"a": 1}])
def test_a_model_without_a_name(stub, measure, listed):
    stub.listed = listed
    code, report, printed = measure()
    assert (code, report) == (2, None)
    assert "no list of models" in printed.err
    assert "--server-model" in printed.err


def test_answers_that_are_nested_without_end(measure, monkeypatch):
    """The list of models, and the body of an error."""
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer(200, DEEP.decode()))
    assert "no list of models" in measure()[2].err
    monkeypatch.setattr(Handler, "chat", lambda self, *_: self.answer(500, DEEP.decode()))
    code, _, printed = measure("--server-model", "m")
    assert code == 2
    assert "answered 500: [[[" in printed.err


def test_thoughts_alone_are_told(stub, measure):
    assert "thoughts alone" not in measure()[2].out
    stub.key = "reasoning_content"
    code, report, printed = measure()
    assert code == 0
    assert "3 replies are thoughts alone" in printed.out
    assert [row["text"] for row in report["outputs"]] == [""] * 3
    assert report["modes"]["server"]["tokens"] == 15


def test_counters_that_contradict_each_other_are_told(measure, monkeypatch):
    """What was measured from outside stays."""
    monkeypatch.setattr(server, "_SETTLE_SECONDS", 0.0)
    page = Stub.page
    odd = 'vllm:spec_decode_num_accepted_tokens_total{model_name="stub"}'
    monkeypatch.setattr(Stub, "page", lambda self: f"{page(self)}\n{odd} {400 * self.replies}")
    code, report, printed = measure()
    mode = report["modes"]["server"]
    assert code == 0
    assert (mode["tokens"], mode["tau"], mode["rounds"], mode["accepted_by_level"]) == (15, None, None, [])
    assert "unknown: vLLM: its counters contradict each other" in printed.out


@pytest.mark.parametrize("url", ["http://me:key@h:1", "http://:key@h:1", "http://h:1/v1?api_key=key"])
def test_keys_in_the_address_are_refused(url, measure):
    """Else they would stand in the report's command and settings."""
    code, report, printed = measure("--server", url)
    assert (code, report) == (2, None)
    assert "$OPENAI_API_KEY" in printed.err
    assert "key@" not in printed.err


def test_addresses_that_are_none(measure):
    code, _, printed = measure("--server", "http://[1")
    assert code == 2
    assert "expected http://host:port" in printed.err


def test_a_silent_server(stub):
    stub.script = {0: "silent"}
    with pytest.raises(ServerError, match=r"silent for 0\.2 s"):
        Endpoint(stub.url, idle_seconds=0.2).chat({"messages": []})


def test_wrong_addresses(stub, measure):
    code, _, printed = measure("--server", f"{stub.url}/elsewhere")
    assert code == 2
    assert "answered 404" in printed.err
    assert "--server-model" in printed.err
    code, _, printed = measure("--server", f"{stub.url}/elsewhere", "--server-model", "m")
    assert code == 2
    assert "/elsewhere/v1/chat/completions answered 404" in printed.err
    code, _, printed = measure("--server", "http://127.0.0.1:1", "--server-model", "m")
    assert code == 2
    assert "is the server running?" in printed.err


@pytest.mark.parametrize("flags, said", [(["--bad-word", "no"], "--bad-word"), (["--logprobs"], "--logprobs")])
def test_what_servers_do_not_take(measure, flags, said):
    """Told before anything is asked of a server, which need not run."""
    code, _, printed = measure("--server", "http://127.0.0.1:1", *flags)
    assert code == 2
    assert f"{said} cannot be asked of --server" in printed.err
    assert not printed.out


def test_conversations_run_at_once(stub, prompts, measure, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join(json.dumps({"prompt": f"{i}"}) for i in range(8)))
    stub.delay = 0.03
    code, report, _ = measure("--prompts", str(many), "--batch", "4")
    mode = report["modes"]["server"]
    assert code == 0
    assert stub.most_under_way == 4
    assert [row["id"] for row in report["outputs"]] == [str(i + 1) for i in range(8)]
    # 32 tokens after the first ones; the run's seconds are shared out, not those of every request added up
    assert mode["seconds"] < 0.75 * 8 * mode["server"]["request_seconds"]["median"]
    assert mode["end_to_end_tokens_per_second"] == pytest.approx(40 / mode["seconds"])
    assert mode["tokens_per_second"] > mode["end_to_end_tokens_per_second"]


def test_repeats(stub, measure):
    stub.delay = 0.005
    code, report, _ = measure("--repeats", "3")
    mode = report["modes"]["server"]
    assert code == 0
    assert len(stub.bodies) == 1 + 3 * 3
    # counters are those of the repeat that is shown
    assert (mode["tokens"], mode["rounds"]) == (15, 6)
    low, high = mode["tokens_per_second_spread"]
    assert low <= mode["tokens_per_second"] <= high


def test_flags_of_the_engine_change_nothing():
    settings = parse_settings(
        ["--server", "http://h:1", "--mode", "tree", "--dtype", "float32", "--hf", "none", "--temperature", "1"]
    )
    assert [note.split()[0] for note in server_notes(settings)] == ["--mode", "--dtype", "--hf"]


def test_template_options_are_sent_where_they_are_given():
    assert "chat_template_kwargs" not in chat_body(parse_settings(["--server", "http://h:1"]), "m", [], 4)
    settings = parse_settings(["--server", "http://h:1", "--template-options", "{enable_thinking: false}"])
    assert chat_body(settings, "m", [], 4)["chat_template_kwargs"] == {"enable_thinking": False}


def test_logit_bias_is_sent_by_token():
    settings = parse_settings(["--server", "http://h:1", "--logit-bias", "5=-2"])
    assert chat_body(settings, "m", [{"role": "user", "content": "x"}], 4)["logit_bias"] == {"5": -2.0}


def test_interrupt_keeps_what_was_finished(stub, tmp_path):
    """^C while a reply streams: exit code 130, the replies before it in the report."""
    many, path = tmp_path / "many.jsonl", tmp_path / "report.json"
    many.write_text("\n".join(json.dumps({"prompt": f"{i}"}) for i in range(9)))
    stub.delay = 0.2
    command = [sys.executable, "-m", "eagle3_infer.cli", "--server", stub.url]
    process = subprocess.Popen(
        [*command, "--prompts", str(many), "--json", str(path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while len(stub.bodies) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    report = json.loads(path.read_text())
    assert report["run"]["interrupted"]
    assert [row["id"] for row in report["outputs"]] == ["1", "2"]
    assert report["modes"]["server"]["tokens"] == 10
    assert b"interrupted" in err
    assert b"failed" not in out
