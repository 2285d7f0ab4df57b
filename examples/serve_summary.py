"""Serve the newest times as JSON over HTTP during training.

python examples/serve_summary.py
curl http://127.0.0.1:8000
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import torch
from torch import nn

from lightning_gputime import GPUPhaseHooks, StepTimes


class Server:
    """Observer that serves the times of the newest step in another thread."""

    def __init__(self, port: int = 8000) -> None:
        self._newest = newest = dict[str, Any]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(newest).encode())

            def log_message(self, *_: Any) -> None: ...  # Do not log requests.

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port

    def attach(self) -> None:
        """Start serving."""
        Thread(target=self._server.serve_forever, daemon=True).start()

    def on_step(self, times: StepTimes) -> None:
        """Keep the times of a step."""
        self._newest |= {"step": times.step, "step_ms": times.step_ms, **times.phase_ms}

    def remove(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def main(server: Server | None = None, steps: int = 2000) -> GPUPhaseHooks:
    """Train a small net, and serve its newest times."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GPUPhaseHooks(model, optimizer, observers=[server or Server()]) as timer:
        for x in timer.steps([torch.randn(8, 32)] * steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return timer


if __name__ == "__main__":
    main()
