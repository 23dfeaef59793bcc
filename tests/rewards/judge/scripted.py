"""A judge's server that gives prepared responses."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lgrpo.types import Completion, Prompt

PROMPT = Prompt(token_ids=[1], text="What is 2 + 2?", row={"question": "2 + 2", "answer": "4"}, position=0)
QUICK = {"retry_delay": 0.0, "model": "judge"}


def completion(text="four"):
    return Completion(token_ids=[1], logprobs=[-0.1], text=text, finish_reason="stop", behaviour_step=0)


def score(reward, *texts):
    return reward([PROMPT] * len(texts), [completion(text) for text in texts])


def answer(content, finish_reason="stop"):
    """Return the body of a response with an answer."""
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]})


class Script:
    """A server that gives prepared responses in order, the last one again and again, and keeps what it was asked.

    A response is the text of an answer; a tuple of status, body and headers; a function of the handler, or of a
    request, that returns one of these; or "hang".
    """

    def __init__(self, *responses, models=answer("")):
        self.responses, self.requests, self.released = list(responses), [], threading.Event()
        self.times: list[float] = []
        self.num_lookups = 0
        script, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with lock:
                    script.num_lookups += 1
                self.respond(200, models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body |= {"key": self.headers["Authorization"], "path": self.path}
                with lock:
                    script.times.append(time.monotonic())
                    script.requests.append(dict(body))
                    response = script.responses.pop(0) if len(script.responses) > 1 else script.responses[0]
                if callable(response):
                    response = response(body)
                if response == "hang":
                    script.released.wait(60)
                elif response == "trickle":
                    self.trickle()
                elif isinstance(response, tuple):
                    self.respond(*response)
                else:
                    self.respond(200, answer(response))

            def respond(self, status, content, *headers):
                content = (content or "").encode()
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def trickle(self):
                """Send a valid answer, a byte now and then, for half a minute."""
                self.send_response(200)
                self.end_headers()
                for _ in range(60):
                    if script.released.wait(0.5):
                        return
                    self.wfile.write(b" ")
                    self.wfile.flush()
                self.wfile.write(answer("Rating: 1").encode())

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_):  # a client that does not wait any longer
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def texts(self):
        """Text of the question of every request."""
        return [request["messages"][0]["content"] for request in self.requests]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
