"""What is wrong with a run's input ends `agentropy train` in one line and exit code 2, and destroys nothing."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentropy
from agentropy.cli import main
from agentropy.training import trainer

TINY = ["--steps", "1", "--rollout.questions", "1", "--rollout.samples", "2", "--evaluation.questions", "0"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Train and expect the one line of a refusal."""
    assert main(["train", *TINY, *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "meta"], "no device 'meta'"),
        (["--device", "warp"], "no device 'warp'"),
        (["--world_options.tool_failures", "many"], "tool_failures"),
        (["--world_options.kinds", "3"], "kinds"),
        (["--world", "facts", "--world_options.knowledge_seed", "x"], "knowledge_seed"),
        (["--protocol_options.tool_tags", "3"], "tool_tags"),
        (["--protocol_options.tool_tags", "{python: 3}"], "tool_tags"),
        (["--protocol_options.tag", "3"], "no option 'tag'"),
        (["--lora.rank", "2", "--lora.targets", "nonsense"], "lora.targets"),
        (["--resume", "x", "--config", "y"], "leave out --config"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    out = tmp_path / "run"
    assert words in refused(capsys, *arguments, "--out", str(out))
    assert not out.exists()


def test_run_directories_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (str(file), str(file / "run"), "/proc/run", "a\0b"):
        assert "choose another --out" in refused(capsys, "--out", out)
    assert file.read_text() == "mine"


def test_a_directory_in_which_another_run_is_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "another process is training" in refused(capsys, "--out", str(tmp_path))
        (tmp_path / "config.yaml").write_text("steps: 1")
        assert main(["train", "--resume", str(tmp_path)]) == 2
        assert "another process is training" in capsys.readouterr().err
    finally:
        os.close(handle)


def embedded_agent() -> Path:
    return Path(agentropy.__file__).parent / "tasks" / "warm_starts" / "arithmetic"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"{% if %}", "chat template cannot be read"),
        ("model.safetensors", b"abc" * 100, "no causal language model that loads"),
        ("tokenizer.json", b"{}", "no tokenizer that loads"),
        ("config.json", b"{", "no causal language model that loads"),
    ],
)
def test_damaged_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, words: str
) -> None:
    model = Path(shutil.copytree(embedded_agent(), tmp_path / "model"))
    (model / name).write_bytes(content)
    assert words in refused(capsys, "--model", str(model), "--world", "arithmetic", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"{", b'{"base_model_name_or_path": "./nowhere", "peft_type": "LORA"}'])
def test_damaged_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_bytes(content)
    refused(capsys, "--model", str(tmp_path / "adapter"), "--world", "arithmetic", "--out", str(tmp_path / "run"))


def test_questions_that_cannot_be_used_leave_no_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "one.jsonl", tmp_path / "run"
    file.write_text('{"question": "a", "answer": "1"}\n')
    arguments = ["--model", str(embedded_agent()), "--protocol", "tags", "--out", str(out)]
    assert "no training question" in refused(capsys, "--tasks", str(file), *arguments)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "a", "text": "b"}\n')
    tools = ["--protocol", "fence", "--tools", f"search:{corpus}"]
    assert "fence" in refused(capsys, "--world", "arithmetic", *arguments, *tools)
    assert not out.exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", *TINY, "--steps", "2", "--checkpoint.every", "1", "--out", str(out)]) == 0
    return out


def test_others_may_read_the_weights_as_they_may_read_the_rest(finished: Path) -> None:
    for place in (finished / "model", finished / "checkpoints" / "step-000002" / "model"):
        modes = {p.name: p.stat().st_mode for p in place.iterdir()}
        assert modes["model.safetensors"] == modes["config.json"]


def resume(run: Path, steps: int = 3) -> int:
    return main(["train", "--resume", str(run), "--steps", str(steps)])


@pytest.mark.parametrize("content", [b"", b"no checkpoint" * 1000, None], ids=["empty", "garbage", "truncated"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    state = run / "checkpoints" / "step-000002" / "state.pt"
    state.write_bytes(state.read_bytes()[:5000] if content is None else content)
    metrics = (run / "metrics.jsonl").read_bytes()
    assert resume(run) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"delete {state.parent}" in lines[0]
    assert (run / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(state.parent)
    assert resume(run) == 0
    assert steps_of(run) == [1, 2, 3]


@pytest.mark.parametrize("tail", [b'{"step": 3, "rew', b"\xff\xfe\0", b'[1]\nnull\n{"step": null}\n'])
def test_what_a_killed_run_left_in_the_metrics_is_dropped(finished: Path, tmp_path: Path, tail: bytes) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    (run / "evaluation-before.json").write_text("{")
    assert resume(run) == 0
    assert steps_of(run) == [1, 2, 3]


def test_an_empty_configuration_is_no_run(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "config.yaml").write_bytes(b"")
    assert resume(run) == 2
    assert "config.yaml is empty" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [1_000_000, 4_000_000], ids=["weights", "state"])
def test_a_checkpoint_that_cannot_be_written_leaves_those_before_it(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        assert resume(run) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "cannot write the checkpoint" in lines[0]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert steps_of(run) == [1, 2, 3]
    assert resume(run) == 0


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a process of its own, in which Ctrl-C is not ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentropy.cli", "train", *TINY, "--steps", "300", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"ended without {words!r}: {process.communicate()[1]}")


def test_sigterm_in_training_saves_and_stops(tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    wait_for(process, "step 1/")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "everything is saved" in out
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_saves_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    """As from a scheduler, which sends it to all processes, and from torchrun, which passes on its own."""
    process = start(tmp_path / "run")
    wait_for(process, "step 1/")
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "everything is saved" in out
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_second_signal_later_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ECHO_SECONDS", 0.0)

    async def run() -> None:
        waiting = object.__new__(trainer.Trainer)
        waiting._stop, waiting._work = asyncio.Event(), None
        with waiting._interruptible():
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(waiting._stop.wait(), 10)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())


def test_a_reader_that_leaves_costs_no_work(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "--steps", "2")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 0
    process.stderr.close()
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_prompts_that_do_not_fit_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--rollout.max_context", "8", "--out", str(tmp_path / "run")]) == 0
    assert "no prompt fits into the context" in capsys.readouterr().out


def test_without_steps_nothing_is_pointed_to_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY, "--steps", "0", "--out", str(tmp_path / "run")]) == 0
    assert "step-000000" not in capsys.readouterr().out


def test_the_sandbox_of_a_run_is_chosen_by_name(tmp_path: Path) -> None:
    from agentropy.errors import UserError
    from agentropy.rollout.parts import make_sandbox
    from agentropy.sandbox import LocalSandbox, RemoteSandbox

    unsafe = make_sandbox("unsafe")
    assert isinstance(unsafe, LocalSandbox)
    assert unsafe.allow_unsafe
    assert not make_sandbox("namespaces").allow_unsafe  # type: ignore[union-attr]
    assert isinstance(make_sandbox("http://127.0.0.1:1"), RemoteSandbox)
    with pytest.raises(UserError, match="unknown isolation 'none'"):
        make_sandbox("none")


def test_search_alone_takes_the_corpus_beside_the_questions(tmp_path: Path) -> None:
    import asyncio

    from agentropy.errors import UserError
    from agentropy.tools.named import tool_by_name
    from agentropy.tools.session import make_toolbox
    from agentropy.trajectory import ToolCall

    with pytest.raises(UserError, match=r"no .*corpus\.jsonl"):
        tool_by_name("search", 1.0, str(tmp_path / "questions.jsonl"))
    with pytest.raises(UserError, match="needs a corpus"):
        tool_by_name("search", 1.0)
    (tmp_path / "corpus.jsonl").write_text('{"title": "Ada", "text": "Ada Lovelace wrote the first program."}\n' * 2)

    async def ask() -> str:
        box = make_toolbox([tool_by_name("search", 1.0, str(tmp_path / "questions.jsonl?grader=f1"))])
        session, _ = await box.open({}, 0)
        (result,) = await session.call([ToolCall("search", {"query": "first program"})])
        return result.content

    assert "Lovelace" in asyncio.run(ask())
