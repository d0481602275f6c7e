# SPDX-License-Identifier: Apache-2.0
"""A server started as the README says, spoken to by the ``openai`` client and by raw HTTP."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
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


# --- options of one request --------------------------------------------------------------------------------------------

POLICIES = "'full', 'streaming_llm', 'snapkv', 'rocketkv' or 'rocketkv_mt'"
REFUSED = {
    "switch": ({"rocketkv": "no"}, "option 'rocketkv' is 'no', but must be 'off' or 'on'"),
    "off and more": (
        {"rocketkv": "off", "rocketkv_prompt_budget": 256},
        "option 'rocketkv_prompt_budget' means nothing beside rocketkv 'off': drop one of the two",
    ),
    "no policy": ({"rocketkv_policy": "rocket"}, f"option 'rocketkv_policy' is 'rocket', but must be {POLICIES}"),
    "policy of another cache": (
        {"rocketkv_policy": "quest"},
        "option 'rocketkv_policy' is 'quest', which a server of policy 'rocketkv' does not offer: "
        f"use {POLICIES}, or start vLLM with policy 'quest'",
    ),
    "budget above the server's": (
        {"rocketkv_prompt_budget": 513},
        "option 'rocketkv_prompt_budget' is 513, but must be an integer from 1 to 512, the server's",
    ),
    "budget below the window": (
        {"rocketkv_prompt_budget": 20},
        "option 'rocketkv_prompt_budget' is 20, less than window_size 32, which is always kept: "
        "raise rocketkv_prompt_budget or lower window_size",
    ),
    "a number as text": (
        {"rocketkv_topk_tokens": "256"},
        "option 'rocketkv_topk_tokens' is '256', but must be an integer from 1 to 16777216",
    ),
    "a list": (
        {"rocketkv_topk_tokens": [256]},
        "option 'rocketkv_topk_tokens' is [256], but must be an integer from 1 to 16777216",
    ),
    "half a page": (
        {"rocketkv_topk_tokens": 66},
        "option 'rocketkv_topk_tokens' is 66, but a step reads whole pages of page_size 4: use 68",
    ),
    "unused": (
        {"rocketkv_policy": "snapkv", "rocketkv_topk_tokens": 64},
        "option 'rocketkv_topk_tokens' means nothing to policy 'snapkv': "
        "drop it or choose rocketkv_policy 'rocketkv' or 'rocketkv_mt'",
    ),
    "unknown": (
        {"rocketkv_top_k": 64},
        "option 'rocketkv_top_k' is unknown: the nearest known name is 'rocketkv_topk_tokens'",
    ),
}
ASKED = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ASKED)
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_option_gets_400_and_one_sentence(server: str, case: str, endpoint: str, stream: bool) -> None:
    options, sentence = REFUSED[case]
    body = ASKED[endpoint] | {"model": "demo", "stream": stream, "max_tokens": 1, "vllm_xargs": options}
    answer = httpx.post(f"{server}/v1/{endpoint}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == f"rocketkv: {sentence}"


@pytest.mark.parametrize("endpoint", ASKED)
def test_options_are_not_lost_in_beam_search(server: str, endpoint: str) -> None:
    body = ASKED[endpoint] | {"model": "demo", "use_beam_search": True, "n": 2, "max_tokens": 2}
    assert httpx.post(f"{server}/v1/{endpoint}", json=body, timeout=60).status_code == 200
    answer = httpx.post(f"{server}/v1/{endpoint}", json=body | {"vllm_xargs": {"rocketkv": "off"}})
    assert answer.status_code == 400, answer.text
    sentence = "rocketkv: option 'rocketkv' is lost in beam search: drop it or drop use_beam_search"
    assert answer.json()["error"]["message"] == sentence


@pytest.mark.parametrize(
    "xargs",
    [
        pytest.param('{"rocketkv_topk_tokens": %s}' % ("[" * 100_000 + "]" * 100_000), id="deep"),
        pytest.param('{"rocketkv_topk_tokens": %s}' % ("9" * 100), id="huge integer"),
        pytest.param('{"rocketkv_topk_tokens": %s}' % ("9" * 10_000), id="integer that cannot be read"),
        pytest.param('{"rocketkv_topk_tokens": NaN}', id="NaN"),
        pytest.param('{"rocketkv_prompt_budget": -Infinity}', id="-Infinity"),
        pytest.param('{"rocketkv_prompt_budget": 1e400}', id="1e400"),
        pytest.param('{"rocketkv_policy": null}', id="null"),
        pytest.param('{"rocketkv_policy": {"a": 1}}', id="object"),
        pytest.param('{"rocketkv_policy": ["full"]}', id="list"),
        pytest.param(json.dumps({"rocketkv_policy": "x" * 1_000_000}), id="long value"),
        pytest.param(json.dumps({"rocketkv_" + "x" * 1_000_000: 1}), id="long name"),
        pytest.param(json.dumps({"rocketkv_policy": "full\u0000\n. \ud800"}), id="odd characters"),
        pytest.param(json.dumps({f"rocketkv_{i}": i for i in range(10_000)}), id="many"),
        pytest.param('["rocketkv"]', id="no object"),
    ],
)
def test_hostile_options_leave_the_server_up(server: str, client: openai.OpenAI, xargs: str) -> None:
    body = f'{{"model": "demo", "prompt": "a", "max_tokens": 1, "vllm_xargs": {xargs}}}'
    answer = httpx.post(f"{server}/v1/completions", content=body.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text[:2000]
    assert httpx.get(f"{server}/health").status_code == 200
    assert complete(client, "Once upon a time", max_tokens=1)


def counted(server: str, ask: Callable[[], str]) -> tuple[str, dict[str, float]]:
    """What ``ask`` returns, and what it adds to this package's counters."""
    wait_until_idle(server)
    before = metrics(server)
    text = ask()
    wait_until_idle(server)
    after = metrics(server)
    names = [name for name in after if name.startswith("rocketkv:") and name.endswith("_total")]
    return text, {name.removeprefix("rocketkv:").removesuffix("_total"): after[name] - before[name] for name in names}


def test_a_smaller_budget_is_honoured(server: str, client: openai.OpenAI, needles: list[tuple[str, str]]) -> None:
    def ask(**options: Any) -> dict[str, float]:
        return counted(server, lambda: complete(client, needles[1][0], extra_body={"vllm_xargs": options}))[1]

    kept = {budget: ask(rocketkv_prompt_budget=budget)["prompt_tokens_kept"] for budget in (256, 384, 512)}
    assert 256 - 128 < kept[256] <= 256
    assert kept[256] < kept[384] <= 384
    assert kept[384] < kept[512] <= 512
    assert kept[512] == ask()["prompt_tokens_kept"]


def test_fewer_tokens_are_read_on_request(server: str, client: openai.OpenAI, needles: list[tuple[str, str]]) -> None:
    def pages(**options: Any) -> float:
        options = {"max_tokens": 9, "extra_body": {"ignore_eos": True, "vllm_xargs": options}}
        return counted(server, lambda: complete(client, needles[1][0], **options))[1]["pages_selected"]

    assert pages(rocketkv_topk_tokens=64) == 8 * 64 / 4
    assert pages(rocketkv_topk_tokens=128) == 8 * 128 / 4
    assert pages(rocketkv_policy="snapkv") == 0


def test_off_gives_the_dense_tokens(
    server: str, client: openai.OpenAI, needles: list[tuple[str, str]], make_engine: Callable[..., Any]
) -> None:
    from vllm import SamplingParams

    # The fourth is no use: whether a full stop follows the answer is a tie that compiled and eager kernels break differently.
    prompts = [prompt for prompt, _ in needles[:3]]
    plain = make_engine()
    params = SamplingParams(temperature=0, max_tokens=demo_document.ANSWER_TOKENS)
    dense = [output.outputs[0].text for output in plain.generate(prompts, params)]

    def ask(options: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
        texts: list[str] = []
        _, counts = counted(
            server,
            lambda: (
                texts.extend(complete(client, prompt, extra_body={"vllm_xargs": options}) for prompt in prompts) or ""
            ),
        )
        return texts, counts

    texts, counts = ask({"rocketkv": "off"})
    assert texts == dense
    assert not any(counts.values()), counts
    texts, counts = ask({"rocketkv_prompt_budget": 160})
    assert texts != dense, "the prompts do not tell dense attention from a small budget"
    assert counts["requests_evicted"] == len(prompts)


def test_requests_with_options_of_their_own_side_by_side(
    server: str, client: openai.OpenAI, needles: list[tuple[str, str]]
) -> None:
    """In one batch, each gets what it gets alone."""
    options = [{}, {"rocketkv": "off"}, {"rocketkv_policy": "snapkv"}, {"rocketkv_prompt_budget": 160}]
    options += [{"rocketkv_topk_tokens": 44}, {"rocketkv_policy": "streaming_llm", "rocketkv_prompt_budget": 256}]

    def ask(xargs: dict[str, Any]) -> str:
        return complete(client, needles[2][0], extra_body={"vllm_xargs": xargs})

    alone = [ask(xargs) for xargs in options]
    assert len(set(alone)) > 1, "the prompt does not tell the options apart"
    with concurrent.futures.ThreadPoolExecutor(len(options)) as pool:
        together = list(pool.map(ask, options))
    assert together == alone
    wait_until_idle(server)
