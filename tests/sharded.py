"""Two processes that write a sharded checkpoint twice: ``python -m tests.sharded FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lgrpo.checkpoints import write_whole


class Small(L.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(8, 8)
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Write(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        write_whole(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        trainer.save_checkpoint(self.path)


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Write(folder / "last.ckpt")],
    )
    torch.manual_seed(0)
    trainer.fit(Small(), DataLoader(torch.randn(8, 8), batch_size=2))


if __name__ == "__main__":
    main()
