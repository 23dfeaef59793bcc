"""Check README, CONTRIBUTING and the pages against the code: examples, links, file names, the package tree."""

from __future__ import annotations

import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import MODEL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = [ROOT / "README.md", *sorted((ROOT / "tutorials" / "pages").glob("*.md"))]


def example(text):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "trainer.fit" in block]
    return code


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180


@pytest.mark.slow("runs lgrpo fit in another process, twice")
@pytest.mark.parametrize(("file", "more"), [("mine.py", ["--data.num_prompts=2"]), ("game.py", [])])
def test_the_classes_of_extend_it(tmp_path, file, more):
    """Run the command of the README with its file, for one rollout."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if block.startswith(f"# {file}")]
    (tmp_path / file).write_text(code)
    name = file.removesuffix(".py")
    (command,) = [line for line in README.splitlines() if line.startswith("lgrpo fit") and f" {name}." in line]
    words = shlex.split(command, comments=True)[1:]
    short = ["--data.num_rollouts=1", "--trainer.max_epochs=1", "--data.evaluation.num_samples=1", "--run=run", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "lgrpo.cli", *words, *short]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"class_path: {name}." in (tmp_path / "run" / "config.yaml").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    if name == "game":
        assert all(row["reward"] == float(row["turns"][-1][0]) for row in rows)
        assert any("Higher." in row["completion"] or "Lower." in row["completion"] for row in rows)


def test_the_quick_start(tmp_path, monkeypatch):
    """Run the example of the README with a small model, two problems and the embedded engine."""
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in (3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = example(README)
    for name, other in {
        '"Qwen/Qwen2.5-1.5B-Instruct"': 'config=SIZE | {"max_position_embeddings": 512}, characters=printable',
        "VLLMEngine(gpu_memory_utilization=0.3, max_model_len=640)": "TransformersEngine()",
        "import VLLMEngine": "import TransformersEngine",
        "GSM8K(": 'GSM8K("rows.jsonl", "rows.jsonl", ',
        ", chat=True": "",
        "num_prompts=32, group_size=16, num_rollouts=40": "num_prompts=2, group_size=4, num_rollouts=2",
        "max_tokens=320": "max_tokens=8",
        'precision="bf16-mixed", accumulate_grad_batches=16': "accumulate_grad_batches=2, logger=False",
    }.items():
        assert name in code, name
        code = code.replace(name, other)
    monkeypatch.chdir(tmp_path)
    names = {"SIZE": MODEL, "printable": string.printable}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].global_step == 2


def test_the_quick_start_has_the_settings_of_its_config():
    config, code = yaml.safe_load((ROOT / "configs" / "quickstart_gsm8k.yaml").read_text("utf-8")), example(README)
    data, trainer = config["data"], config["trainer"]
    for setting in (
        config["model"]["policy"]["name"],
        json.dumps(data["task"]["init_args"]["template"]["prompt"]),
        f"lr={config['model']['optimizer']['init_args']['lr']:g}".replace("e-06", "e-6"),
        f"num_prompts={data['num_prompts']}, group_size={data['group_size']}, num_rollouts={data['num_rollouts']}",
        f"max_tokens={data['sampling']['max_tokens']}",
        f"period={config['weight_sync']['period']}",
        f"accumulate_grad_batches={trainer['accumulate_grad_batches']}",
        *(f"{name}={value}" for name, value in data["engine"]["init_args"].items()),
    ):
        assert setting in code


def test_the_demo_in_python(tmp_path, monkeypatch, capsys):
    """Run the example of the page, with fewer rollouts."""
    code = example((ROOT / "tutorials" / "pages" / "commands.md").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    shorter = code.replace("num_rollouts=100", "num_rollouts=3").replace("max_epochs=8", "max_epochs=1")
    assert shorter != code
    exec(compile(shorter, "commands.md", "exec"), {})
    assert float(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("tensor(").removesuffix(")")) > 0.2
    assert not (tmp_path / "completions.jsonl").exists()


@pytest.mark.parametrize("page", sorted((ROOT / "tutorials" / "pages").glob("*.md")), ids=lambda path: path.name)
def test_every_page_is_linked(page):
    assert f"tutorials/pages/{page.name}" in README


@pytest.mark.parametrize("source", [ROOT / "CONTRIBUTING.md", *SOURCES], ids=lambda path: path.name)
def test_links_lead_somewhere(source):
    for target in re.findall(r"\]\(([^)#]+)\)", source.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (source.parent / target).exists(), target


def test_contributing_shows_every_package():
    packages = {path.name for path in (ROOT / "lgrpo").iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert packages == set(re.findall(r"[├└]── ([\w.]+?)/?\s", CONTRIBUTING))


@pytest.mark.parametrize("source", [ROOT / "CONTRIBUTING.md", *SOURCES], ids=lambda path: path.name)
def test_mentioned_files_exist(source):
    paths = re.findall(r"\b(?:lgrpo|tests|configs|tutorials)/[\w./-]+\.(?:py|md|yaml|js)\b", source.read_text("utf-8"))
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_the_two_paths_name_modules_that_exist():
    section = CONTRIBUTING.partition("## Two paths")[2].partition("## How to add")[0]
    modules = re.findall(r"[\w/]+\.py", section)
    assert len(modules) >= 10
    assert [module for module in modules if not (ROOT / "lgrpo" / module).exists()] == []
