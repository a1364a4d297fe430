"""Recordings from inside a script: nothing of another run is reported, no exception waits, names are replaced once."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import time
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from paro_advise.runtime.adapters.names import replace_everywhere  # noqa: E402
from paro_advise.runtime.integrations.recording import Recording  # noqa: E402


def train(steps):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_report_is_of_this_run_alone(tmp_path, capsys):
    with Recording(tmp_path / "run", "2:4"):
        train(6)
    report = tmp_path / "run" / "analyze.json"
    assert report.exists()
    assert "wrote" in capsys.readouterr().err
    report.unlink()
    (tmp_path / "run" / "steps.rank7.jsonl").write_text("{}\n")
    with Recording(tmp_path / "run", "4:6"):
        train(1)  # too few for a trace
    assert not report.exists()
    assert not list((tmp_path / "run").glob("rank*.json.gz"))
    assert not (tmp_path / "run" / "steps.rank7.jsonl").exists()


def test_an_exception_is_not_held_up(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    began = time.monotonic()
    with pytest.raises(ValueError, match="of the script"), Recording(tmp_path / "run", "2:4"):
        train(5)
        raise ValueError("of the script")
    assert not (tmp_path / "run" / "analyze.json").exists()
    assert time.monotonic() - began < 60  # the wait for other ranks alone would be as long


def test_a_recording_that_has_not_begun_goes_to_other_processes(tmp_path):
    assert pickle.loads(pickle.dumps(Recording(tmp_path, "2:4"))) is not None


def test_names_that_others_have_imported_are_replaced(monkeypatch):
    home, user, lazy = ModuleType("torch_like"), ModuleType("a_script"), importlib.util.find_spec("this")
    original, substitute = object(), object()
    vars(home)["wrapper"] = vars(user)["renamed"] = original
    module = importlib.util.module_from_spec(lazy)
    loader = importlib.util.LazyLoader(lazy.loader)
    loader.exec_module(module)
    for name, value in (("torch_like", home), ("a_script", user), ("a_lazy_one", module)):
        monkeypatch.setitem(sys.modules, name, value)
    replace_everywhere("wrapper", substitute, home)
    assert vars(home)["wrapper"] is vars(user)["renamed"] is substitute
    assert "s" not in object.__getattribute__(module, "__dict__")  # of `this`: it was not imported
