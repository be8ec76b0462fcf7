"""The configuration: YAML and dotted options are one thing, and what is wrong is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentropy.config import RunConfig, dotted_keys, load_config, parse_overrides, resolved, save_config
from agentropy.errors import UserError


def test_every_key_is_an_option_by_its_dotted_name() -> None:
    keys = dotted_keys()
    assert {"method", "rollout.samples", "optim.lr", "evaluation.every", "lora.rank"} <= keys.keys()
    assert "optim" not in keys


def test_options_go_on_top_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: grpo\nrollout:\n  samples: 4\n  questions: 3\n")
    config = load_config(path, parse_overrides(["--rollout.samples", "6", "--optim.lr=1e-4", "--seed", "3"]))
    assert (config.method, config.rollout.samples, config.rollout.questions) == ("grpo", 6, 3)
    assert config.optim.lr == 1e-4
    assert config.seed == 3


def test_texts_stay_texts_on_the_command_line() -> None:
    config = load_config(None, parse_overrides(["--out", "2024", "--system", "Note: be brief"]))
    assert (config.out, config.system) == ("2024", "Note: be brief")
    assert load_config(None, parse_overrides(["--system", "null"])).system is None


def test_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, parse_overrides(["--method_options.alpha", "0.05", "--tools", "python,search:a.jsonl"]))
    save_config(config, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == config
    assert config.method_options == {"alpha": 0.05}
    assert config.tools == ["python", "search:a.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rollout.sampels", "3"], "did you mean 'rollout.samples'"),
        (["--lr", "3"], "did you mean 'optim.lr'"),
        (["--optim.lr", "-1"], "optim.lr"),
        (["--rollout.samples", "many"], "rollout.samples"),
        (["--world", "facts", "--tasks", "x.jsonl"], "not both"),
        (["--tasks", "x.jsonl"], "needs 'model'"),
        (["stray"], "stray"),
        (["--rollout.samples", "--seed", "1"], "rollout.samples: needs a value"),
        (["--optim.lr", ".inf"], "optim.lr.*finite"),
        (["--rollout.temperature", ".nan"], "rollout.temperature.*finite"),
        (["--optim.betas", "[0.9, 1.0]"], "optim.betas.1"),
        (["--rollout", "3"], "is a section"),
        (["--threads", "100000"], "threads.*1024"),
        (["--rollout.top_k", str(2**70)], "rollout.top_k"),
        (["--loss.clip_high", "1e300"], "loss.clip_high"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config(None, parse_overrides(arguments))


def test_unknown_keys_in_a_file_name_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optim:\n  learning_rate: 1\n  lrr: 3\n")
    with pytest.raises(UserError, match=r"run.yaml: unknown key 'optim.learning_rate'"):
        load_config(path)
    path.write_text("steps: [1")
    with pytest.raises(UserError, match=r"run.yaml: not YAML"):
        load_config(path)
    with pytest.raises(UserError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")


def test_a_flag_without_a_value_is_true_and_null_is_none() -> None:
    assert load_config(None, parse_overrides(["--evaluation.greedy", "--optim.lr", "null"])) == RunConfig()
    assert load_config(None, parse_overrides(["--evaluation.greedy", "false"])).evaluation.greedy is False


def test_what_depends_on_the_model_is_filled_in() -> None:
    embedded = resolved(RunConfig())
    assert (embedded.world, embedded.protocol, embedded.rollout.max_new_tokens) == ("arithmetic", "tags", 128)
    assert embedded.optim.lr == 5e-4
    other = resolved(RunConfig(model="m", tasks="t.jsonl", rollout={"tool_timeout": 9.0}))  # type: ignore[arg-type]
    assert (other.world, other.protocol, other.rollout.max_new_tokens) == (None, "hermes", 1024)
    assert other.optim.lr == 1e-6
    assert other.rollout.tool_timeout == 9.0
    assert resolved(RunConfig(model="m", lora={"rank": 8})).optim.lr == 1e-5  # type: ignore[arg-type]
    assert resolved(embedded) == embedded


@pytest.mark.parametrize("content", [b"\xff\xfes\0", b"\0\0", b"- a\n", b"[" * 3000, b"rollout: 3\n", b"1: 2\n"])
def test_files_that_are_no_configuration_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"run\.yaml"):
        load_config(path)


def test_a_byte_order_mark_and_carriage_returns_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfsteps: 3\r\nrollout:\r\n  samples: 4\r\n")
    config = load_config(path)
    assert (config.steps, config.rollout.samples) == (3, 4)
