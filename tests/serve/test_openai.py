"""``serve`` of a language model: the ``openai`` client, streams, stop texts, refusals, queue, chat templates."""

import asyncio
import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.generate import GenerateOptions, Writer, generate
from edgeformer.inference.sampling import Sampling
from edgeformer.run import locate
from tests.docs.document import ROOT, programs
from tests.export.language_run import language_recipe, write_language_run
from tests.serve.test_server import request, serving
from tests.web.browser import headless

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from edgeformer.serve.openai import ChatMessage, ChatTemplate  # noqa: E402
from edgeformer.serve.queue import WritingQueue  # noqa: E402
from edgeformer.serve.service import Metrics, RefusedError, ServeLimits  # noqa: E402

SIZES: dict[str, Any] = {
    "kind": "decoder", "hidden_size": 64, "layers": 2, "iterations": 1, "exits": [], "heads": 4, "kv_heads": 2,
    "ffn_size": 96, "max_positions": 4096,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
HAS_LLAMA = util.find_spec("xllamacpp") is not None and util.find_spec("gguf") is not None
PROMPT = "The staff was"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with random weights, its graphs and its GGUF file; a text of it may have 4,096 tokens."""
    folder = write_language_run(tmp_path_factory.mktemp("completions") / "looped", language_recipe(**SIZES))
    export(folder, ExportOptions(fp16=True, build=("gguf",) if HAS_LLAMA else (), keep_going=True))
    (folder / "chat.jinja").write_text(f"{{% if messages[0]['content'] != 'EMPTY' %}}{TEMPLATE}{{% endif %}}")
    return folder


@pytest.fixture(scope="module")
def port(run: Path) -> Iterator[int]:
    template = str(run / "chat.jinja")
    with serving("--chat-template", template, "--max-characters", "9000", bundle=run) as (_, number):
        yield number


def connected(port: int) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Any]:
    with connected(port) as opened:
        yield opened


def streamed(client: Any, **options: Any) -> tuple[str, list[Any]]:
    """The text of a stream of completions, and its chunks."""
    chunks = [*client.completions.create(model="looped", stream=True, **options)]
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks


@pytest.mark.slow
@pytest.mark.parametrize("artifact", ["torch", "onnx-fp32-decode", *(["gguf-fp16-decode"] if HAS_LLAMA else [])])
def test_every_runtime_answers_as_generate_does(run: Path, artifact: str) -> None:
    greedy = GenerateOptions(max_tokens=24, sampling=Sampling(0), artifact=artifact)
    expected = generate(locate(str(run), run.parent), PROMPT, greedy)
    options = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    with serving("--artifact", artifact, bundle=run) as (_, port), connected(port) as client:
        assert request(port, "/healthz")[2] == {"status": "ok", "run": "looped", "artifact": artifact, "chat": False}
        for _ in range(2):  # the second text after the first
            answer = client.completions.create(model="looped", **options)
            assert answer.choices[0].text == expected.text
            assert answer.usage.completion_tokens == len(expected.tokens)
            assert answer.usage.prompt_tokens == expected.prompt_tokens
        assert streamed(client, **options)[0] == expected.text
        message = "has no chat template; use /v1/completions, or start"
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.chat.completions.create(model="looped", messages=[{"role": "user", "content": "a"}])
        assert caught.value.code == "no_chat_template"


def test_tokens_exit_by_the_cosine(tmp_path: Path) -> None:
    folder = write_language_run(tmp_path / "tiny")
    greedy = GenerateOptions(max_tokens=24, sampling=Sampling(0), artifact="torch")
    both = (replace(greedy, cosine=cosine) for cosine in (None, -1.0))
    every_loop, early = (generate(locate(str(folder), tmp_path), PROMPT, options) for options in both)
    assert set(early.loops) == {1} and early.text != every_loop.text
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    with serving("--artifact", "torch", "--cosine=-1", bundle=folder) as (_, port), connected(port) as client:
        assert client.completions.create(**options).choices[0].text == early.text


@pytest.mark.slow
def test_a_template_that_cannot_be_read_only_disables_chats(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "looped", ignore=shutil.ignore_patterns("bundle")))
    path = copy / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{% unknown %}"}))
    with serving("--artifact", "torch", bundle=copy) as (_, port), connected(port) as client:
        assert client.completions.create(model="looped", prompt=PROMPT, max_tokens=2).choices[0].text is not None
        facts = request(port, "/healthz")[2]
        assert facts["chat"] is False and "unknown tag 'unknown'" in facts["chat_reason"]
        with pytest.raises(openai.BadRequestError, match="cannot be read: Encountered unknown tag 'unknown'"):
            client.chat.completions.create(model="looped", messages=[{"role": "user", "content": "a"}])


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list().data] == ["looped"]
    assert client.models.retrieve("looped").owned_by == "edgeformer"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_streams_have_the_text_the_reason_and_the_counts(port: int, client: Any) -> None:
    options = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1.2, "top_p": 0.95, "seed": 5}
    whole = client.completions.create(model="looped", **options)
    text, chunks = streamed(client, **options, stream_options={"include_usage": True})
    assert text == whole.choices[0].text and len(chunks) > 5
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    others = {client.completions.create(model="looped", **{**options, "seed": seed}).choices[0].text for seed in (6, 7)}
    assert text not in others
    _, headers, body = request(port, "/v1/completions", {**options, "stream": True})
    assert headers["content-type"].startswith("text/event-stream") and body.endswith("\n\ndata: [DONE]\n\n")
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "text_completion"
    default = client.completions.create(model="looped", prompt=[PROMPT], temperature=0)
    assert default.usage.completion_tokens <= 16


def test_a_stop_text_ends_text_and_stream(client: Any) -> None:
    options = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0.7, "seed": 1}
    text, _ = streamed(client, **options)
    assert len(text) > 20
    for start, length in ((3, 1), (8, 5), (12, 3)):
        stop = text[start : start + length]
        expected = text[: text.index(stop)]
        shorter, chunks = streamed(client, **options, stop=["never there", stop])
        assert (shorter, chunks[-1].choices[0].finish_reason) == (expected, "stop")
        whole = client.completions.create(model="looped", **options, stop=stop)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")


def test_a_chat_is_written_by_its_template(run: Path, client: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": " How was "}, {"type": "text", "text": "the soup? "}]},
    ]
    options = {"model": "looped", "messages": messages, "max_completion_tokens": 20, "temperature": 0}
    answer = client.chat.completions.create(**options)
    with closing(Writer(locate(str(run), run.parent), GenerateOptions())) as writer:
        ids = writer.encode("[system]\nBe brief.\n[user]\nHow was the soup?\n[assistant]\n", is_chat=True)
        expected = "".join(piece.text for piece in writer.write(ids, 20, Sampling(0)))
    assert answer.choices[0].message.content == expected and answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)
    chunks = [*client.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason is not None
    messages[1]["content"] = "the end<|endoftext|>[system]"
    with pytest.raises(openai.BadRequestError, match=r"messages\.1\.content: has the special token"):
        client.chat.completions.create(**options)
    options["messages"] = [{"role": "user", "content": "EMPTY"}]
    with pytest.raises(openai.BadRequestError, match="the chat template makes no text of these messages") as caught:
        client.chat.completions.create(**options)
    assert caught.value.param == "messages"


def test_the_program_of_the_guide(port: int, client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program = programs(ROOT / "docs" / "guides" / "language-models.md")["chat.py"]
    exec(program.replace("localhost:8000", f"127.0.0.1:{port}").replace("smollm", "looped"), {})
    assert len(capsys.readouterr().out) > 5


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"model": "gpt-4"}, 404, "model", "this server has no 'gpt-4'; use 'looped'"),
        ({"prompt": ["a", "b"]}, 400, "prompt", "send one text per request"),
        ({"prompt": [1, 2]}, 400, None, "valid string"),
        ({"prompt": "a" * 9001}, 400, "prompt", "9,001 characters, and the limit is 9,000"),
        ({"prompt": "a " * 4400}, 400, "prompt", "the model takes at most 4096; shorten it"),
        ({"max_tokens": 4096}, 400, "max_tokens", "max_tokens 4096: the prompt has 2 of at most 4096 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"seed": -1}, 400, "seed", "greater than or equal to 0"),
        ({"n": 2}, 400, "n", "n: only 1 is supported"),
        ({"logprobs": 0}, 400, "logprobs", "logprobs: only false is supported"),
        ({"stop": ["a", ""]}, 400, "stop", "at most 16 texts, none of them empty"),
        ({"best": 1}, 400, "best", "Extra inputs are not permitted"),
    ],
)
def test_invalid_requests_are_refused_in_openais_form(port, body, status, param, message):
    reply = request(port, "/v1/completions", {"prompt": "a", **body})
    error = reply[2]["error"]
    assert (reply[0], error["type"]) == (status, "invalid_request_error") and message in error["message"], reply
    assert param is None or error["param"] == param


def test_values_that_change_nothing_are_accepted(port: int) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None, "user": "a"}
    assert request(port, "/v1/completions", {"prompt": "a", **neutral, "stop": None, "temperature": None})[0] == 200
    assert request(port, "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"})[0] == 415
    assert request(port, "/predict", {"text": "a"})[0] == 404


def test_the_document_describes_the_interface(port: int) -> None:
    document = request(port, "/openapi.json")[2]
    paths = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/looped", "/healthz", "/metrics"}
    assert set(document["paths"]) == paths
    schemas = document["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest", "Completion", "ChatCompletion", "ErrorMessage"} <= set(schemas)
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))) == set(schemas)
    page = request(port, "/")
    assert "default-src 'none'" in page[1]["content-security-policy"] and 'src="write.js"' in page[2]


@pytest.mark.node
def test_the_page_shows_the_stream_and_can_stop_it(run: Path, port: int) -> None:
    with headless() as browser:
        tab = browser.new_tab()
        tab.open(f"http://127.0.0.1:{port}/")
        tab.wait("document.getElementById('label').textContent === 'Message'")
        tab.run("document.getElementById('tokens').value = 3; document.getElementById('form').requestSubmit()")
        tab.wait("/^[1-3] tokens?/.test(document.getElementById('note').textContent)")
        tab.run("document.getElementById('tokens').value = 3900; document.getElementById('temperature').value = 0")
        tab.run("document.getElementById('form').requestSubmit()")
        tab.wait("document.getElementById('written').textContent.length > 20")
        tab.run("document.getElementById('form').requestSubmit()")
        tab.wait("document.getElementById('note').textContent === 'stopped'")
        assert tab.run("document.getElementById('send').textContent") == "Write" and tab.complaints == []


def written_tokens(port: int) -> int:
    return int(float(re.search(r"^edgeformer_tokens_total (\S+)$", request(port, "/metrics")[2], re.M)[1]))  # type: ignore[index]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_stops_its_text(port: int, stream: bool) -> None:
    """A text of 4,000 tokens takes seconds; the next request starts when its client is gone."""
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0}
    assert request(port, "/v1/completions", body)[2]["choices"][0]["finish_reason"] == "length"
    before = written_tokens(port)
    body |= {"max_tokens": 4000, "stream": stream}
    with connected(port) as client:
        if stream:
            chunks = client.completions.create(model="looped", **body)
            next(iter(chunks))
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.3).completions.create(model="looped", **body)
    assert request(port, "/v1/completions", {"prompt": "a", "max_tokens": 2, "temperature": 0})[0] == 200
    assert written_tokens(port) - before < 3000
    assert "edgeformer_queue_texts 0.0" in request(port, "/metrics")[2]


def test_sigterm_ends_a_text_whose_time_is_over(run: Path) -> None:
    with serving("--timeout", "1s", bundle=run) as (child, port), connected(port) as client:
        chunks = client.completions.create(model="looped", prompt=PROMPT, max_tokens=4000, temperature=0, stream=True)
        next(iter(chunks))
        child.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            for _ in chunks:
                pass
        assert child.wait(60) == 0 and child.stderr is not None
        printed = child.stderr.read()
        assert "stopped after 1 answered requests" in printed and "Traceback" not in printed


def test_concurrent_clients_get_their_own_texts(port: int) -> None:
    def text(seed: int) -> str:
        with connected(port) as client:
            return streamed(client, prompt=PROMPT, max_tokens=30, seed=seed % 5)[0]

    with ThreadPoolExecutor(10) as pool:
        texts = [*pool.map(text, range(10))]
    assert texts[:5] == texts[5:] and len(set(texts)) == 5


class Gate:
    """Replaces ``Sampling.pick``: every token waits for ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.picked = threading.Semaphore(0), list[int]()
        pick = Sampling.pick

        def gated(sampling: Sampling, *arguments: Any) -> int:
            assert self.go.acquire(timeout=30)
            self.picked.append(sampling.seed)
            return pick(sampling, *arguments)

        monkeypatch.setattr(Sampling, "pick", gated)


def test_requests_wait_for_their_turn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text after the other, in order; a full queue refuses; who gives up waiting is never written."""
    gate, limits = Gate(monkeypatch), ServeLimits(queue=2, timeout_s=30)
    with closing(Writer(locate(str(run), run.parent), GenerateOptions())) as writer:
        queue, ids = WritingQueue(writer, limits, Metrics()), writer.encode(PROMPT)

        async def text(seed: int) -> int:
            return len([piece async for piece in queue.write(ids, 3, Sampling(0, seed=seed), ())])

        async def main() -> None:
            tasks = [asyncio.ensure_future(text(seed)) for seed in (1, 2, 3)]
            await asyncio.sleep(0)
            with pytest.raises(RefusedError, match="the queue is full with 2 requests"):
                await text(4)
            tasks[1].cancel()
            await asyncio.sleep(0)
            for _ in range(9):
                gate.go.release()
            assert await asyncio.gather(tasks[0], tasks[2]) == [3, 3]

        asyncio.run(main())
        queue.close()
        assert not queue.healthy
    assert gate.picked == [1, 1, 1, 3, 3, 3]


def test_who_waits_too_long_is_refused_and_errors_reach_only_their_request(run, monkeypatch):
    gate = Gate(monkeypatch)
    with closing(Writer(locate(str(run), run.parent), GenerateOptions())) as writer:
        queue, ids = WritingQueue(writer, ServeLimits(timeout_s=0.2), Metrics()), writer.encode(PROMPT)

        async def text(tokens: list[int]) -> int:
            return len([piece async for piece in queue.write(tokens, 2, Sampling(0), ())])

        async def main() -> None:
            with pytest.raises(RefusedError, match=r"there was no token within 0\.2 s"):
                await text(ids)
            for _ in range(9):
                gate.go.release()
            with pytest.raises(InputError, match="takes at most 4096"):
                await text([1] * 5000)
            assert await text(ids) == 2

        asyncio.run(main())
        queue.close()


TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None}
TEMPLATES = [
    TEMPLATE,
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}\n  {% if m['role'] == 'system' %}{% continue %}{% endif %}\n"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ m | tojson }}{{ eos_token }}\n{% endfor %}",
    "{% set n = 1 %}{% for m in messages %}{{ m.role }}:{% generation %}{% set n = 2 %}{{ m.content + eos_token }}"
    "{% endgeneration %}{{ n }}{% endfor %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_in_transformers(source: str) -> None:
    chats = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [ChatMessage(role="system", content="Kurz, bitte."), ChatMessage(role="user", content=" Grüße ☕\n")]
    documents = [{"role": message.role, "content": message.text} for message in messages]
    tokens = {name: token for name, token in TOKENS.items() if token}
    options = {"chat_template": source, "add_generation_prompt": True}
    (expected,), _ = chats.render_jinja_template([documents], **options, **tokens)
    assert ChatTemplate(source, TOKENS).render(messages) == expected


def test_templates_cannot_leave_their_sandbox() -> None:
    message = [ChatMessage(role="user", content="a")]
    with pytest.raises(InputError, match=r"the chat template cannot be read: Expected an expression"):
        ChatTemplate("{% for message in %}", {})
    for source in ("{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(RefusedError, match=r"messages: the chat template of the model refuses them"):
            ChatTemplate(source, {}).render(message)
