"""The example notebook runs, as it is, on a run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentropy.trajectory import write_jsonl
from test_analysis_cli import trajectories

NOTEBOOK = Path(__file__).parents[1] / "examples" / "call_effects.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in cells)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's own code
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    source = tmp_path / "run" / "trajectories"
    source.mkdir(parents=True)
    write_jsonl(source / "step-000001.jsonl", trajectories())
    monkeypatch.setenv("SOURCE", str(tmp_path / "run"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert any("error" in o.get("text", "") and "ok" in o["text"] for o in outputs)
    assert any("arguments" in o.get("data", {}).get("text/html", "") for o in outputs)
