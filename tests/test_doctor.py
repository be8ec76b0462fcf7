"""`agentropy doctor`: what it finds here, and what it says where something is missing."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from agentropy.cli import main
from agentropy.commands import doctor


def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        "torch",
        "isolation: ",
        "proven denied: read a file outside",
        "a session: ",
        "Hugging Face cache",
        "cpu, ",
    ):
        assert part in text
    assert text.endswith("this machine is fit\n")


def test_a_missing_package_is_a_problem_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version

    def without(name: str) -> str:
        if name in ("rich", "peft"):
            raise metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "bm25s" else real(name)

    monkeypatch.setattr(metadata, "version", without)
    found = doctor.packages()
    assert any(mark == doctor.BAD and "rich is missing: pip install 'rich>=" in text for mark, text in found)
    assert any(
        mark == doctor.BAD and "bm25s 0.0.1 is not what is needed: pip install 'bm25s>=" in text for mark, text in found
    )
    assert any(
        mark == doctor.NOTE and "extra lora: no peft; pip install 'agentropy[lora]'" in text for mark, text in found
    )


def test_no_sandbox_makes_the_machine_unfit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from agentropy.errors import UserError
    from agentropy.sandbox import LocalSandbox

    async def refuse(self: LocalSandbox) -> None:
        raise UserError("no safe sandbox on this machine: no Landlock")

    monkeypatch.setattr(LocalSandbox, "start", refuse)
    monkeypatch.setattr(doctor, "packages", list)
    monkeypatch.setattr(doctor, "device", list)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "BAD  no safe sandbox on this machine: no Landlock" in text
    assert text.endswith("1 problem to solve\n")


def test_caches_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("AGENTROPY_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = "\n".join(text for _, text in doctor.caches())
    assert f"{tmp_path}/hf (not there yet)" in text
    assert f"{tmp_path}/own" in text
    assert "HF_HUB_OFFLINE" in text
