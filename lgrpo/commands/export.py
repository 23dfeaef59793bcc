"""``lgrpo export``: the policy of a checkpoint as a Hugging Face folder for ``from_pretrained`` and ``vllm serve``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lgrpo.commands import command_parser


def main(args: list[str]) -> None:
    """Write the policy of a checkpoint to a new folder; the folder appears only if everything was written."""
    parser = command_parser(
        "export",
        "The folder contains the weights, the tokenizer and a model card. Adapters are merged into the weights.",
        "lgrpo export runs/demo demo-model --dtype bfloat16",
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="Checkpoint, or folder of a run (its newest checkpoint)."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="Folder to write. It must be empty if it exists.")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="Config of the run. Default: config.yaml of the checkpoint's run."
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="Data type of the weights. Default: the policy's."
    )
    parser.add_argument("--adapter", action="store_true", help="Write only the LoRA adapter, in the format of peft.")
    options = parser.parse_args(args)

    from transformers.utils import logging

    from lgrpo.commands.hf_folder import load_policy, write_adapter_folder, write_model_folder
    from lgrpo.commands.model_card import model_card
    from lgrpo.commands.settings import parse_settings, read_settings

    logging.disable_progress_bar()
    out: Path = options.out
    try:
        checkpoint = find_checkpoint(options.checkpoint)
        config_path = options.config or find_config(checkpoint)
        settings = parse_settings([f"--config={config_path}"]) if options.config else read_settings(config_path)
        policy, step = load_policy(checkpoint, settings)
        if options.adapter and policy.lora is None:
            raise ValueError("--adapter: this run trained no adapters (policy.lora is not set)")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is not empty, and nothing is overwritten: choose another folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
            folder = Path(temporary) / "export"
            if options.adapter:
                checksum = write_adapter_folder(policy, folder)
            else:
                checksum = write_model_folder(policy, folder, options.dtype)
            card = model_card(out.name, policy, settings, config_path.parent, step)
            (folder / "README.md").write_text(card, "utf-8")
            if out.exists():
                out.rmdir()
            shutil.move(folder, out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lgrpo: {error}") from error
    print(f"The policy of optimizer step {step} is in {out}/, checksum {checksum}")


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest one of a run folder; raise if it is damaged."""
    from lgrpo.run.checkpoints import META, SIZES, damage, newest_checkpoint

    is_sharded = (path / SIZES).exists() or (path / META).exists()
    if path.is_dir() and not is_sharded:
        return newest_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not path.exists():
        raise ValueError(f"there is no checkpoint at {path}")
    if (problem := damage(path)) is not None:
        raise ValueError(f"the checkpoint {path} is damaged: {problem}")
    return path


def find_config(checkpoint: Path) -> Path:
    """Return the config of the run that a checkpoint belongs to."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if (folder / "config.yaml").exists():
            return folder / "config.yaml"
    raise ValueError(f"there is no config.yaml beside {checkpoint}: give the config of the run with --config")
