"""A plan in transformers' Trainer: torchrun --nproc-per-node 2 scripts/examples/in_hf_trainer.py plan.json config.json

The Trainer leaves alone what transformers itself sharded while it loaded a model, and tells it by two attributes
without a promise; a model under a plan is given them. The plan says which rank reads what, so the loader is its own,
and is not prepared. transformers neither saves nor resumes such a model whole: tpplan.save_checkpoint does.
"""

import argparse
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import tpplan


class Sequences(Dataset):
    """Made-up sequences, as a Trainer takes them."""

    def __init__(self, number: int, seq_len: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (number, seq_len), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PlannedTrainer(Trainer):
    """A Trainer whose ranks read the rows that a plan gives them."""

    def __init__(self, *, plan: tpplan.Plan, **options: object) -> None:
        self.plan = plan
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False  # the loss is the one that was planned: the mean of a micro-batch

    def get_train_dataloader(self) -> DataLoader:
        share = self.plan.batch_for(self.args.process_index)
        sampler = tpplan.PlanSampler(share, len(self.train_dataset))
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    def log(self, logs: dict[str, float], *rest: object, **more: object) -> None:
        if "loss" in logs and self.is_world_process_zero():
            print(f"step {self.state.global_step - 1} loss {logs['loss']:.6f}", flush=True)


def marked_as_sharded(model: torch.nn.Module, plan: tpplan.Plan) -> torch.nn.Module:
    """The model with what tells the Trainer to leave it as it is."""
    mesh = plan.mesh
    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = DistributedConfig(
        tp_size=mesh.tp, fsdp_size=mesh.shard, dp_replicate_size=mesh.replicate
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("config", help="config.json of the planned model")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    plan = tpplan.Plan.load(args.plan)
    options = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=plan.batch.micro_batch,
        gradient_accumulation_steps=plan.batch.accumulation_steps,
        max_steps=args.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    device = options.device  # makes the process group
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(args.config)
    model = AutoModelForCausalLM.from_config(config).to(device)
    model = marked_as_sharded(tpplan.apply_plan(model, plan), plan)
    data = Sequences(args.steps * plan.batch.global_batch, plan.batch.seq_len, config.vocab_size)
    PlannedTrainer(plan=plan, model=model, args=options, train_dataset=data).train()


if __name__ == "__main__":
    main()
