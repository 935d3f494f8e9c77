"""The page in a real browser without a window, driven over the DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridengine import cli
from tests.extras.lab.view.runs import write_run
from tests.tiny_models import save_tiny

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None and "GITHUB_ACTIONS" not in os.environ,  # the workflow must have one
        reason="needs chromium (apt install chromium)",
    ),
]

READY = """new Promise(resolve => {
  const look = () => document.body?.dataset.ready ? resolve("ready") : setTimeout(look, 20);
  look();
})"""


def write_page(run: Path, *options: str) -> Path:
    result = CliRunner().invoke(
        cli.app, ["view", str(run), "--html", str(run / "p.html"), *options]
    )
    assert result.exit_code == 0, result.output
    return run / "p.html"


@contextmanager
def opened(page: Path, profile: Path) -> Iterator[Callable[[str], Any]]:
    """Open a page from disk; yield a function that evaluates JavaScript, promises included."""
    from websockets.sync.client import connect  # with vLLM's server

    assert BROWSER is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    size, folder = "--window-size=1200,800", f"--user-data-dir={profile}"
    command = [BROWSER, *options, size, folder, page.as_uri()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        assert browser.stderr is not None
        try:
            line = next(line for line in browser.stderr if "DevTools listening on" in line)
            host = line.split("ws://")[1].split("/")[0]
            with urllib.request.urlopen(f"http://{host}/json/list", timeout=60) as reply:
                targets = json.load(reply)
            [target] = [t for t in targets if t["url"].startswith("file:")]
            with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:

                def call(code: str) -> dict[str, Any]:
                    params = {"expression": code, "awaitPromise": True, "returnByValue": True}
                    message = {"id": 1, "method": "Runtime.evaluate", "params": params}
                    socket.send(json.dumps(message))
                    return dict(json.loads(socket.recv(timeout=120)))

                def evaluate(code: str) -> Any:
                    reply = call(code)["result"]
                    assert "exceptionDetails" not in reply, reply
                    return reply["result"].get("value")

                # The blank page before it goes away with what waits in it.
                while call(READY).get("result", {}).get("result", {}).get("value") != "ready":
                    pass
                yield evaluate
        finally:
            browser.terminate()


def test_a_person_uses_the_page(tmp_path: Path) -> None:
    page = write_page(write_run(tmp_path / "run"))
    assert "http" not in page.read_text().replace("http-equiv", "")  # loads nothing
    with opened(page, tmp_path / "profile") as js:
        assert js("count.textContent") == "18 of 18"
        assert js("document.title") == "Rollouts of run"  # no text of a rollout runs
        js("filter.value = 'step>=2 group=11 reward=2', select()")
        assert js("count.textContent") == "2 of 18"
        js("filter.value = 'prompt 1', select()")
        assert js("count.textContent") == "9 of 18"
        texts = "[...document.querySelectorAll('.card .tokens')].map(x => x.textContent)"
        assert js(texts) == ["[7][8]", "[3]", "[4]"]
        folded = "[...document.querySelectorAll('.card details')].map(x => x.open)"
        assert js(folded) == [True, True, False, True, False]  # prompt, 3 turns, columns
        colour = "getComputedStyle(document.querySelector('.tokens span')).backgroundColor"
        before = js(colour)
        js("$('color').value = 'difference', drawDetail()")
        assert js(colour) != before and js("$('label').textContent").startswith("probability")
        js("press('group'), drawDetail()")
        assert js("document.querySelectorAll('#cards .card').length") == 3
        js("press('steps'), drawDetail()")
        assert js("document.querySelectorAll('#cards .card').length") == 9


def test_ten_thousand_rollouts_render_only_what_is_visible(tmp_path: Path) -> None:
    page = write_page(write_run(tmp_path / "run", steps=50, prompts=20, n=10))
    with opened(page, tmp_path / "profile") as js:
        assert js("count.textContent") == "10,000 of 10,000"
        assert js("document.querySelectorAll('.entry').length") < 60
        js("choose(9999), drawDetail()")
        assert js("document.querySelector('.entry.on').textContent").startswith("reward 9step 50")
        assert js("document.querySelectorAll('.entry').length") < 60
        js("filter.value = 'step=50 onerror', select()")
        assert js("count.textContent") == "20 of 10,000"


def test_attention_of_a_rollout(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    model = save_tiny("llama", tmp_path / "model")
    page = write_page(
        run, "--filter", "step=1", "--attention", "step=2 row=1", "--checkpoint", str(model)
    )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    with opened(page, tmp_path / "profile") as js:
        assert js("count.textContent") == "7 of 7"
        assert js("[data.attention.layers, data.attention.heads]") == [
            config.num_hidden_layers,
            config.num_attention_heads,
        ]
        js("new Promise(r => { const f = () => $('layer') ? r() : setTimeout(f, 20); f(); })")
        row_sums = (
            "unpack('weights').then(b => { const w = new Uint8Array(b); const sums = [];"
            "for (let k = 0; k < w.length; k += 7) sums.push(w.slice(k, k + 7)"
            ".reduce((a, x) => a + x, 0)); return sums; })"
        )
        assert js(row_sums) == pytest.approx(
            [255] * (7 * config.num_hidden_layers * config.num_attention_heads), abs=4
        )  # bytes are rounded
        entropies = js("payload(data.attention.entry).then(x => x.values.entropy)")
        assert len(entropies) == 4 and all(x > 0 for x in entropies)
