"""What the doctor says where something is missing. That a whole machine is well is tested end to end."""

from __future__ import annotations

import importlib.metadata

import pytest

from mkb_env.cli import doctor


def test_packages_found_against_required(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=999", "no-such-package>=1", "msgspec>=0.1", "ray>=2; extra == 'ray'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    numpy, absent, msgspec = doctor._packages()
    assert not numpy.ok
    assert numpy.fix == "pip install 'numpy>=999'"
    assert importlib.metadata.version("numpy") in numpy.detail
    assert not absent.ok
    assert absent.detail.startswith("not installed")
    assert msgspec.ok
    assert msgspec.fix == ""


def test_every_requirement_of_this_installation_is_met() -> None:
    checks = list(doctor._packages())
    assert {check.name for check in checks} >= {"torch", "gymnasium", "apache-tvm", "nvidia-cutlass-dsl"}
    assert [check for check in checks if not check.ok] == []


def test_libraries_and_python() -> None:
    assert doctor._libraries().ok
    assert doctor._python().ok


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from mkb_env.recorder import libraries

    monkeypatch.setattr(libraries, "FOLDER", tmp_path)
    check = doctor._libraries()
    assert not check.ok
    assert "C compiler" in check.fix


def test_sandbox_and_gpu_are_notes_not_requirements() -> None:
    assert not doctor._sandbox().required
    assert "memory" in doctor._sandbox().detail
    assert not doctor._gpu().required


def test_report_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [doctor.Check("thing", False, "not [here]", "get it"), doctor.Check("other", True, "fine")]
    doctor.show_checks(checks, healthy=False)
    text = capsys.readouterr().out
    assert "MISSING" in text
    assert "not [here]" in text
    assert "cannot judge" in text
