"""``lgrpo configs``, and configs given by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lgrpo.cli import main
from lgrpo.commands.configs import config_names, find_config, first_sentence, with_config_paths

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_config_is_listed_with_its_first_sentence(capsys):
    main(["configs"])
    printed = capsys.readouterr().out
    assert len(config_names()) == len(list(CONFIGS.rglob("*.yaml")))
    assert [line.split()[0] for line in printed.splitlines() if line[0] != " "] == config_names()
    assert "Evaluate a model, or a checkpoint of a run, without training it\n" in printed
    assert all(len(first_sentence(find_config(name)).split()) >= 4 for name in config_names())


def test_lines_fit_into_120_columns():
    texts = {path: path.read_text(encoding="utf-8").splitlines() for path in CONFIGS.rglob("*.yaml")}
    assert [(path.name, line) for path, lines in texts.items() for line in lines if len(line) > 120] == []


def test_first_sentence(empty_folder):
    path = empty_folder / "a.yaml"
    path.write_text("# Dr. GRPO (Liu et al., eq. 3): two\n# lines. And more.\ndata: {}\n")
    assert first_sentence(path) == "Dr. GRPO (Liu et al., eq. 3): two lines"


def test_show_and_copy(empty_folder, capsys):
    main(["configs", "show", "papers/a_gsm8k"])
    assert capsys.readouterr().out == (CONFIGS / "papers" / "a_gsm8k.yaml").read_text()
    main(["configs", "copy", "papers/a_gsm8k"])
    assert (empty_folder / "a_gsm8k.yaml").read_text() == (CONFIGS / "papers" / "a_gsm8k.yaml").read_text()
    with pytest.raises(ValueError, match=r"a_gsm8k\.yaml exists already: choose another name with --to"):
        main(["configs", "copy", "papers/a_gsm8k"])
    main(["configs", "copy", "ddp", "--to", "mine.yaml"])
    assert (empty_folder / "mine.yaml").exists()


@pytest.mark.parametrize("given", ["demo", "demo.yaml", "configs/demo", "configs/demo.yaml"])
def test_a_packaged_config_by_name(given):
    assert find_config(given) == CONFIGS / "demo.yaml"


@pytest.mark.parametrize("name", ["demo", "demo.yaml"])
def test_a_file_in_the_current_folder_is_preferred(name, empty_folder):
    (empty_folder / name).write_text("seed_everything: 1\n")
    assert find_config("demo") == Path(name)


def test_arguments():
    demo, ddp = str(CONFIGS / "demo.yaml"), str(CONFIGS / "ddp.yaml")
    given = ["fit", "--config", "demo", "--config=ddp", "--run", "demo", "--config", "{trainer: {max_epochs: 2}}"]
    expected = ["fit", "--config", demo, f"--config={ddp}", "--run", "demo", "--config", "{trainer: {max_epochs: 2}}"]
    assert with_config_paths(given) == expected
    assert with_config_paths(["fit", "--config"]) == ["fit", "--config"]


def test_plan_of_a_packaged_config(capsys):
    main(["plan", "--config", "tiny", "--config", "configs/reuse.yaml"])
    assert "v = 10, i = 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["fit", "--config", "dmeo"], "did you mean demo?"),
        (["plan", "--config=configs/on_polcy.yaml"], "did you mean on_policy?"),
        (["sweep", "perod"], "did you mean period?"),
        (["configs", "show", "xyz"], "that name; lgrpo configs lists all of them"),
    ],
)
def test_unknown_names(arguments, advice):
    with pytest.raises(ValueError, match=r"there is no file .*, and no packaged config of that name") as caught:
        main(arguments)
    assert advice in str(caught.value)
