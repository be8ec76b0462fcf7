"""A study's file: what it means, and what is said about what is wrong in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentropy.cli import main
from agentropy.errors import UserError
from agentropy.study.plan import matches, overrides_of, read_study
from study_runs import study_of


def test_two_names_are_a_complete_study(tmp_path: Path) -> None:
    study = study_of(tmp_path, variants=["grpo", "tao-rl"])
    assert [r.name for r in study.runs] == [
        f"default/{variant}/seed-{seed}" for seed in (0, 1, 2) for variant in ("grpo", "tao-rl")
    ]
    assert [r.config.method for r in study.runs[:2]] == ["grpo", "tao-rl"]
    assert {r.config.threads for r in study.runs} == {1}
    assert study.baselines == {"grpo": ("grpo",)}
    assert [c.label for c in study.spec.columns][:2] == ["Avg@{k}", "Pass@{k}"]


def test_base_then_setting_then_variant_dotted_or_nested(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        base={"steps": 7, "rollout": {"samples": 4, "questions": 2}, "method_options": {"alpha": 0.5}},
        settings={"facts": None, "long": {"world": "facts", "steps": 9, "world_options.hits": 3}},
        variants={
            "tao-rl": {},
            "q": {"method": "tao-rl", "steps": 11, "rollout.samples": 8, "method_options.q_h": 0.5},
        },
        seeds=[4],
        validation=True,
    )
    by_name = {f"{r.setting}/{r.variant}": r.config for r in study.runs}
    assert by_name["facts/tao-rl"].world == "facts"
    assert by_name["facts/tao-rl"].steps == 7
    assert by_name["long/tao-rl"].steps == 9
    assert by_name["long/q"].steps == 11
    assert by_name["long/q"].world_options == {"hits": 3}
    assert by_name["long/q"].rollout.samples == 8
    assert by_name["long/q"].rollout.questions == 2
    assert by_name["long/q"].method_options == {"alpha": 0.5, "q_h": 0.5}
    assert by_name["facts/tao-rl"].method_options == {"alpha": 0.5}
    assert {c.seed for c in by_name.values()} == {4}
    assert {c.evaluation.split for c in by_name.values()} == {"validation"}
    assert overrides_of(study.spec, "long", "q")["rollout.samples"] == 8


def test_only_and_skip(tmp_path: Path) -> None:
    keys = {"settings": ["arithmetic", "facts"], "variants": ["grpo", "tao-rl", "arpo"], "seeds": 1}
    study = study_of(tmp_path, **keys, only=["facts/*", "arithmetic/grpo"], skip="facts/a*")
    assert [f"{r.setting}/{r.variant}" for r in study.runs] == ["arithmetic/grpo", "facts/grpo", "facts/tao-rl"]
    assert matches("grpo", "facts", "grpo")
    assert matches("facts/grpo/seed-1", "facts", "grpo", 1)
    assert not matches("facts/grpo/seed-1", "facts", "grpo", 2)


def test_baselines(tmp_path: Path) -> None:
    variants = ["grpo", "arpo", "tao-rl"]
    assert study_of(tmp_path, variants=variants, baseline="arpo").baselines == {"arpo": ("arpo",)}
    mean = study_of(tmp_path, variants=variants, baseline=["grpo", "arpo"]).baselines
    assert mean == {"the mean of grpo, arpo": ("grpo", "arpo")}
    both = study_of(tmp_path, variants=variants, baseline={"GRPO": "grpo", "all": variants}).baselines
    assert both == {"GRPO": ("grpo",), "all": tuple(variants)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("variants: [grpo]\nsead: 3", "unknown key 'sead'; did you mean 'seeds'?"),
        ("variants: [grpo]\nsteps: 3", "belong under 'base'"),
        ("seeds: 3", "'variants' is missing"),
        ("variants: []", "variants: is empty"),
        ("variants: [grpo]\nseeds: [0, 0]", "different whole numbers"),
        ("variants: [grpo]\nseeds: 0", "at least one seed"),
        ("variants: [grpo]\nseeds: [0, x]", "seeds.1"),
        ("variants: [grpoo]", "no 'method' here or in base"),
        ("variants: [grpoo]", "did you mean 'grpo'?"),
        ("variants: [grpo, grpo]", "a name is there twice"),
        ("variants:\n  grpo:\n  grpo:", "'grpo' is there twice"),
        ("variants: {../x: {method: grpo}}", "cannot be the name of a folder"),
        ("name: a/b\nvariants: [grpo]", "cannot be the name of a folder"),
        (
            "variants: {grpo: {stepz: 3}}",
            "settings.default with variants.grpo: unknown key 'stepz'; did you mean 'steps'?",
        ),
        ("variants: {grpo: {steps: many}}", "variants.grpo: steps: "),
        ("variants: {grpo: {seed: 3}}", "list it under 'seeds'"),
        ("variants: [grpo]\nbase: {out: x}", "its own directory"),
        ("variants: [grpo]\nbase: {method_options.alpha: 1}", "method grpo has no option 'alpha'"),
        ("variants: [grpo]\nbase: {world: maths}", "no world 'maths'"),
        ("variants: [grpo]\nbase: {world_options.hits: 3}", "world arithmetic has no setting 'hits'"),
        ("variants: [grpo]\nbase: {tools: [abacus]}", "no built-in tool 'abacus'"),
        ("variants: [grpo]\nbase: {log: [chalk]}", "no tracker 'chalk'"),
        ("variants: [grpo]\nbaseline: tao-rl", "baseline: no variant 'tao-rl'"),
        ("variants: [grpo]\nonly: 'fact/*'", "only: 'fact/*' matches no setting/variant, such as 'default/grpo'"),
        ("variants: [grpo]\nskip: '*'", "leave nothing to run"),
        ("variants: [grpo]\ncolumns: [{metrik: eval/avg}]", "unknown key 'columns.0.metrik'; did you mean 'metric'?"),
        ("variants: [grpo]\ncolumns: [{metric: eval/avg, at: later}]", "columns.0.at"),
        ("variants: [grpo]\ncurves: 3", "curves"),
        ("variants: [grpo", "not YAML"),
        ("- grpo", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_study(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert main(["study", str(path), "--dry-run"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_wrong_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_of(tmp_path, variants=["grpo"])
    path = str(tmp_path / "study.yaml")
    for arguments, words in (
        ([path, "--jobs=0"], "--jobs must be at least 1"),
        ([path, "--only=arpo"], "called like 'default/grpo/seed-0'"),
        ([path, "--report-only"], "there are no runs"),
        ([path, f"--out={path}"], "choose another --out"),
        ([str(tmp_path / "no.yaml")], "no.yaml: No such file"),
        ([str(tmp_path)], "cannot read"),
    ):
        assert main(["study", *arguments]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_of(tmp_path, variants=["grpo", "tao-rl"], base={"steps": 3}, seeds=2, jobs=3)
    assert main(["study", str(tmp_path / "study.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 runs, 3 at once" in out
    assert "default/tao-rl: threads 1, steps 3, method tao-rl" in out
    assert "4 missing" in out
    assert not (tmp_path / "out").exists()


def test_runs_that_share_a_server_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = "http://127.0.0.1:9"
    study_of(tmp_path, variants=["grpo", "tao-rl"], base={"rollout.server": server})
    assert main(["study", str(tmp_path / "study.yaml"), "--dry-run"]) == 0
    assert "6 runs, 1 at once" in capsys.readouterr().out
    assert main(["study", str(tmp_path / "study.yaml"), "--dry-run", "--jobs", "2"]) == 2
    assert "same server (rollout.server http://127.0.0.1:9): set jobs to 1" in capsys.readouterr().err
    own = {name: {"method": name, "rollout.server": f"{server}/{name}"} for name in ("grpo", "tao-rl")}
    study_of(tmp_path, variants=own, seeds=1)
    assert main(["study", str(tmp_path / "study.yaml"), "--dry-run", "--jobs", "2"]) == 0


def test_the_studies_of_the_documentation_are_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "study.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "study.yaml").write_text(block)
        assert read_study(tmp_path / "study.yaml").runs
