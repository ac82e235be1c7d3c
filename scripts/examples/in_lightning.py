"""A plan in Lightning, which starts the ranks itself: python scripts/examples/in_lightning.py plan.json

ModelParallelStrategy makes the process group and calls configure_model, where the plan is applied. Lightning's own
sampler is off: the plan says which rank reads what.
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tpplan
from scripts.examples import llama


class Planned(lightning.LightningModule):
    """The model under its plan, and its data."""

    def __init__(self, plan: tpplan.Plan, steps: int) -> None:
        super().__init__()
        self.plan, self.steps = plan, steps
        self.model: nn.Module | None = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Called when there is a process group, and more than once."""
        if self.model is None:
            torch.manual_seed(0)
            self.model = tpplan.apply_plan(llama.build_model().to(self.device), self.plan)

    def train_dataloader(self) -> DataLoader:
        data = llama.example_inputs(self.steps * self.plan.batch.global_batch, self.plan.batch.seq_len)
        dataset = TensorDataset(data["tokens"], data["targets"])
        sampler = tpplan.PlanSampler(self.plan.batch_for(self.global_rank), len(dataset))
        return DataLoader(dataset, batch_sampler=sampler)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs = {"tokens": batch[0], "targets": batch[1]}
        loss = llama.loss(self.model(inputs["tokens"]), inputs)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        loss = self.trainer.strategy.reduce(torch.stack(self.losses).mean(), reduce_op="mean")
        self.losses.clear()
        if self.global_rank == 0:
            print(f"step {self.trainer.global_step} loss {loss.item():.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    plan = tpplan.Plan.load(args.plan)
    mesh = plan.mesh
    trainer = lightning.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=min(mesh.num_gpus, plan.cluster.gpus_per_node),
        num_nodes=-(-mesh.num_gpus // plan.cluster.gpus_per_node),
        strategy=ModelParallelStrategy(data_parallel_size=mesh.data_parallel, tensor_parallel_size=mesh.tp),
        accumulate_grad_batches=plan.batch.accumulation_steps,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,  # tpplan.save_checkpoint writes what any other plan loads
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Planned(plan, args.steps))


if __name__ == "__main__":
    main()
