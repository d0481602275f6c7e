# SPDX-License-Identifier: Apache-2.0
"""A server started as the README says, spoken to by the ``openai`` client and by raw HTTP."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples import demo_document

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.engine

BUDGET = 512


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``make serve`` on a free port; yields its base URL."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = ["make", "serve", f"PORT={port}", 'ROCKETKV={"prompt_budget": 512}']
    if demo_model != str(ROOT / ".cache" / "demo-model"):
        command.append(f"MODEL={demo_model}")
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail("the server did not start\n" + log.read_text()[-3000:])


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=600, max_retries=0)


@pytest.fixture(scope="module")
def needles(tokenizer: Any) -> list[tuple[str, str]]:
    depths = demo_document.needle_depths(demo_document.NUM_NEEDLES)
    lengths = [1200, 1800, 2400, 3000]
    return [demo_document.needle_prompt(tokenizer, lengths[i % 4], depths[i % 12], i) for i in range(16)]


def metrics(server: str) -> dict[str, float]:
    """Every sample of ``/metrics``, summed over labels."""
    samples: dict[str, float] = {}
    for line in httpx.get(f"{server}/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            samples[name] = samples.get(name, 0.0) + value
    return samples


def wait_until_idle(server: str) -> None:
    """Until no request runs and no block is in use."""
    for _ in range(120):
        now = metrics(server)
        idle = now["vllm:num_requests_running"] == 0 and now["vllm:num_requests_waiting"] == 0
        if idle and now["vllm:kv_cache_usage_perc"] == 0:
            return
        time.sleep(0.5)
    pytest.fail("blocks are still in use: " + str(metrics(server)["vllm:kv_cache_usage_perc"]))


def complete(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    options = {"max_tokens": demo_document.ANSWER_TOKENS, "temperature": 0} | options
    return str(client.completions.create(model="demo", prompt=prompt, **options).choices[0].text)


def test_completions_streaming_and_not(client: openai.OpenAI, needles: list[tuple[str, str]]) -> None:
    prompt, answer = needles[3]
    whole = complete(client, prompt)
    assert answer in whole
    stream = client.completions.create(
        model="demo", prompt=prompt, max_tokens=demo_document.ANSWER_TOKENS, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole


def test_chat_streaming_and_not(client: openai.OpenAI, tokenizer: Any) -> None:
    fact = demo_document.make_fact(5, 0.5)
    document = demo_document.make_document(2000, tokenizer, [fact], seed=5)
    messages: Any = [
        {"role": "user", "content": f"{document}\n\n{fact.question} Answer with the number only."},
        {"role": "assistant", "content": fact.answer_start},
    ]
    options: Any = {
        "model": "demo",
        "messages": messages,
        "max_tokens": demo_document.ANSWER_TOKENS,
        "temperature": 0,
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert whole
    assert fact.number in whole
    deltas = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **options)]
    assert "".join(deltas) == whole


def test_sixteen_concurrent_long_prompts(server: str, client: openai.OpenAI, needles: list[tuple[str, str]]) -> None:
    before = metrics(server)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda item: complete(client, item[0]), needles))
    numbers = [number for _, number in needles]
    assert len(set(numbers)) == 16
    for text, own in zip(answers, numbers, strict=True):
        assert not any(other in text for other in numbers if other != own), "a reply holds another request's fact"
    # The model misses one of these facts when asked alone, too; accuracy is test_engine's subject.
    assert sum(own in text for text, own in zip(answers, numbers, strict=True)) >= 14, answers
    wait_until_idle(server)
    after = metrics(server)
    evicted = after["rocketkv:requests_evicted_total"] - before["rocketkv:requests_evicted_total"]
    kept = after["rocketkv:prompt_tokens_kept_total"] - before["rocketkv:prompt_tokens_kept_total"]
    assert evicted == 16
    assert 0 < kept <= 16 * BUDGET
    assert after["rocketkv:blocks_freed_total"] > before["rocketkv:blocks_freed_total"]
    assert after["rocketkv:pages_selected_total"] > before["rocketkv:pages_selected_total"]


def test_abort_mid_stream_frees_everything(server: str, client: openai.OpenAI, needles: list[tuple[str, str]]) -> None:
    for prompt, _ in needles[:3]:
        stream = client.completions.create(
            model="demo", prompt=prompt, max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()
    body = {"model": "demo", "prompt": needles[3][0] + " again", "max_tokens": 400}
    with pytest.raises(httpx.ReadTimeout):  # gone while its prompt is being computed
        httpx.post(f"{server}/v1/completions", json=body, timeout=0.3)
    wait_until_idle(server)
    prompt, answer = needles[0]
    assert answer in complete(client, prompt)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{", id="not JSON"),
        pytest.param(b'{"model": "demo"}', id="no prompt"),
        pytest.param(b'{"model": "demo", "prompt": "a", "max_tokens": -1}', id="negative max_tokens"),
        pytest.param(b'{"model": "demo", "prompt": "a", "max_tokens": 99999999}', id="huge max_tokens"),
        pytest.param(b'{"model": "demo", "prompt": "a", "temperature": "hot"}', id="wrong type"),
        pytest.param(b'{"model": "demo", "prompt": [999999999]}', id="token out of range"),
    ],
)
def test_malformed_request_leaves_the_server_up(
    server: str, client: openai.OpenAI, needles: list[tuple[str, str]], body: bytes
) -> None:
    answer = httpx.post(f"{server}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert httpx.get(f"{server}/health").status_code == 200
    prompt, number = needles[0]
    assert number in complete(client, prompt)
